"""Python's collector of cycles: what is imported stays, and it would look through all of it again and again."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_ours = 0  # blocks of nothing_left that are open. Asking gc.get_freeze_count() counts one by one, 50 ms within such a block


@contextmanager
def paused() -> Iterator[None]:
    """Nothing is collected within the block, which saves a fifth of the time that torch and Lightning take. Behind it all objects of the
    process count as old, those from before it too."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if not _ours and not gc.get_freeze_count():  # else what another has frozen would thaw
            gc.freeze()
            gc.unfreeze()  # into the oldest generation, unseen
        if was_on:
            gc.enable()


@contextmanager
def nothing_left() -> Iterator[None]:
    """Behind the block, no cycle that was made in it is left. What was there before is not looked through for that: with all libraries
    loaded it takes half a second."""
    global _ours
    if freezes := not _ours and not gc.get_freeze_count():
        gc.collect(1)  # what was dropped a moment ago, such as a model, would stay to the end
        gc.freeze()
    _ours += freezes
    try:
        yield
    finally:
        gc.collect()
        _ours -= freezes
        if freezes:
            gc.unfreeze()
