"""Python's search for cycles within a run."""

import gc
import weakref

from llava_ds.runtime.main_thread import frozen_gc


class Node:
    """An object that holds itself."""

    def __init__(self) -> None:
        self.itself = self


def test_what_exists_is_passed_over_what_is_garbage_is_not():
    old, garbage = Node(), weakref.ref(Node())
    with frozen_gc():
        assert garbage() is None
        assert gc.get_freeze_count() > 10_000 and not any(each is old for each in gc.get_objects())
        new = weakref.ref(Node())
        gc.collect()
        assert new() is None
    assert gc.get_freeze_count() == 0 and any(each is old for each in gc.get_objects())
