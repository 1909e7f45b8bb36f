"""The store of URLs in the place of paths."""

from types import ModuleType

from llava_ds.extensions.base import Extension


def store() -> ModuleType:
    """The module that does, which a run without URLs has no use for."""
    from llava_ds.extensions.object_store import store as module

    return module


extension = Extension(store=store)
