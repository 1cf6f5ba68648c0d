"""The collector of cycles, which waits while much is imported."""

import gc
import weakref
from contextlib import suppress

import pytest

from lm import collector


class Node:
    """One of a cycle of one."""

    def __init__(self) -> None:
        self.next = self


@pytest.mark.slow
def test_what_was_made_meanwhile_is_old_and_collected_all_the_same() -> None:
    with collector.paused():
        assert not gc.isenabled()
        node = Node()
        seen = weakref.ref(node)
    assert gc.isenabled() and gc.get_freeze_count() == 0
    assert any(each is node for each in gc.get_objects(generation=2))
    del node
    gc.collect()
    assert seen() is None


def test_a_collector_that_was_off_or_has_frozen_stays_so() -> None:
    gc.disable()
    gc.freeze()
    try:
        with collector.paused():
            pass
        assert not gc.isenabled() and gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()
        gc.enable()


def test_an_error_in_the_block_does_not_leave_it_off() -> None:
    with pytest.raises(KeyError), collector.paused():
        raise KeyError
    assert gc.isenabled()


def test_nothing_is_left_of_a_block_nor_held_within_it_of_what_was_dropped_before() -> None:
    dropped = weakref.ref(Node())  # such as a model of the caller's own, of whose memory the block has need
    with collector.nothing_left():
        assert dropped() is None and gc.get_freeze_count() > 0
        within = weakref.ref(Node())
        with collector.nothing_left(), collector.paused():
            pass
        assert gc.get_freeze_count() > 0
    assert within() is None and gc.get_freeze_count() == 0


def test_what_an_error_left_is_gone_within_the_next_block() -> None:
    """Seen to fail: it counted as old, and stayed behind all further blocks too."""
    seen: list[weakref.ref[Node]] = []

    def fail() -> None:
        node = Node()
        seen.append(weakref.ref(node))
        raise KeyError

    with suppress(KeyError), collector.nothing_left():
        fail()
    with collector.nothing_left():
        assert seen[0]() is None
