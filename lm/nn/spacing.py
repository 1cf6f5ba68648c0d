"""Layers at one place of every n: those without a window, without rotation, or with a table of their own."""

from collections.abc import Mapping


def is_there(layer: int, every: int | None, at: int | None) -> bool:
    """Returns whether a layer is the one at place `at` (None: the last) of every so many; every None: none is."""
    return every is not None and layer % every == (every - 1 if at is None else at)


def require_place(every_key: str, every: int | None, at_key: str, at: int | None) -> None:
    """Raises ValueError for a place that is none of the layers."""
    if at is None:
        return
    if every is None:
        raise ValueError(f"{at_key}={at} has no effect without {every_key}. Set it, or drop {at_key}.")
    if at >= every:
        raise ValueError(f"{at_key}={at} is none of {every_key}={every} layers. Lower it, or drop it.")


def evenly(chosen: Mapping[int, bool]) -> tuple[int, int | None] | None:
    """Returns (n, i) with the least n so that exactly the i-th of every n layers is chosen (i None: the last), whatever it is for layers
    that are not asked about. None: no layer is chosen, or they are not spaced evenly."""
    first = next((layer for layer, one in chosen.items() if one), None)
    if first is None:
        return None
    for every in range(1, max(chosen) + 2):
        at = first % every
        if all(one == (layer % every == at) for layer, one in chosen.items()):
            return every, None if at == every - 1 else at
    return None
