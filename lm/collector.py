"""Python's collector of cycles: what is imported stays, and it would look through all of it again and again."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_OF_PYTHON = 1000  # Python 3.12 begins with 375 frozen objects
_ours = 0  # blocks of nothing_left that are open
_failed = False  # the last of them ended with an error, whose traceback held what was made in it at its end


@contextmanager
def paused() -> Iterator[None]:
    """Nothing is collected within the block, which saves a fifth of the time that torch and Lightning take. Behind it all objects of the
    process count as old, those from before it too."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if not _ours and not _frozen():
            gc.freeze()
            gc.unfreeze()  # into the oldest generation, unseen
        if was_on:
            gc.enable()


@contextmanager
def nothing_left() -> Iterator[None]:
    """Behind the block, no cycle that was made in it is left; where an error ends it, whose traceback holds them, the next block begins
    with that. What was there before is not looked through otherwise: with all libraries loaded it takes half a second."""
    global _ours, _failed
    if freezes := not _ours and not _frozen():
        gc.collect(2 if _failed else 1)  # what was dropped a moment ago, such as a model, would stay to the end
        gc.freeze()
    _ours, _failed = _ours + freezes, False
    try:
        yield
    except BaseException:
        _failed = True
        raise
    finally:
        gc.collect()
        _ours -= freezes
        if freezes:
            gc.unfreeze()


def _frozen() -> bool:
    """Whether another has frozen objects, which would thaw with ours. They are counted one by one: 50 ms within `nothing_left`."""
    return gc.get_freeze_count() > _OF_PYTHON
