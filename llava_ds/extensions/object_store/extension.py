"""The extension that reads URLs instead of paths."""

from types import ModuleType

from llava_ds.extensions.base import Extension


def store() -> ModuleType:
    """Return the module that reads URLs, imported only when needed."""
    from llava_ds.extensions.object_store import store as module

    return module


extension = Extension(store=store)
