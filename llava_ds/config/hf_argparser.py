"""transformers' parser of dataclasses, loaded from its own file. Importing the whole package takes most of a second, a
delay for --help and for wrong flags."""

import importlib.util
from pathlib import Path
from types import ModuleType


def _module() -> ModuleType:
    """Load transformers/hf_argparser.py (5.23). It imports nothing else of the package."""
    package = importlib.util.find_spec("transformers")
    path = Path(package.submodule_search_locations[0], "hf_argparser.py")
    spec = importlib.util.spec_from_file_location(f"{__name__}.transformers", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_parser = _module()
HfArg, HfArgumentParser, string_to_bool = _parser.HfArg, _parser.HfArgumentParser, _parser.string_to_bool
