"""Declaration of a flag: a dataclass field with default, help text and metadata."""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Literal

# Titles of the core's flag groups in --help, in order; an extension's group has its name.
GROUPS = {
    "run": "the run",
    "model": "the model",
    "tower": "the vision tower",
    "trainable": "what trains",
    "data": "the data",
    "images": "images and videos",
    "order": "order of the samples",
    "objective": "what is learned",
    "steps": "steps and batches",
    "optimizer": "optimizer and schedule",
    "speed": "precision, memory and speed",
    "eval": "eval loss",
    "logging": "logging",
    "checkpoints": "checkpoints and the finished model",
    "failures": "when something goes wrong",
}


def _hf_argparser() -> ModuleType:
    """Load transformers/hf_argparser.py (5.23) without the rest of the package, whose import takes most of a second and
    would delay --help and messages about wrong flags."""
    package = importlib.util.find_spec("transformers")
    path = Path(package.submodule_search_locations[0], "hf_argparser.py")
    spec = importlib.util.spec_from_file_location(f"{__name__}.transformers", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_parser = _hf_argparser()
HfArg, HfArgumentParser, string_to_bool = _parser.HfArg, _parser.HfArgumentParser, _parser.string_to_bool


@dataclass(frozen=True)
class Flag:
    """Metadata of a flag, in addition to type, bounds, default and help.

    group: a key of GROUPS, or an extension's name. path: kind of path, None if the flag is not a path. "model": a model
    folder, which users may confuse with a name on the hub; "pattern": a file, a folder or a pattern like shard-*.tar;
    "output": a folder that may have to be created; "unchecked": a path that is checked later. remote: the path may also
    be the URL of an object in a store. only_to_train: the path is checked for training only, not for scripts that only
    read the flags. resume: values that a resumed run may have. "compared": the checkpoint's value, unless
    --allow_changed_flags names the flag; "free": any value, because the trained model stays the same (for a path, the
    contents are compared); "rewind": any value, unless the run may rewind to a checkpoint, so that they affect
    steps; "layout": any value, if the loss does not depend on the layout; "placement": any value, because the layout
    stays the same. per_machine: machines may have different values, as they may for paths. shares_samples: the value is
    a number of ranks with the same samples. of_micro_batch: values other than the default make the loss depend on the
    layout. goes_with: for a flag of an extension, the values that use it, among those the extension adds to core flags.
    """

    group: str
    path: Literal["file", "folder", "model", "pattern", "output", "unchecked"] | None = None
    remote: bool = False
    only_to_train: bool = False
    resume: Literal["compared", "free", "rewind", "layout", "placement"] = "compared"
    per_machine: bool = False
    shares_samples: bool = False
    of_micro_batch: bool = False
    goes_with: str = ""


def flags_of(group: str, **about: object) -> tuple[Callable[..., object], Callable[..., object]]:
    """Return two functions that declare fields as flags of a group. Flags of the second may change freely on a resume.

    about: more fields of Flag, for all flags that these functions declare.
    """
    return partial(_declare, group=group, **about), partial(_declare, group=group, resume="free", **about)


def _declare(
    default: object, help: str, *, aliases: tuple[str, ...] = (), argparse: dict | None = None, **about: object
) -> object:
    """Declare a field as a flag. about: fields of Flag; argparse: more options for add_argument."""
    metadata = {**(argparse or {}), "flag": Flag(**about)}
    return HfArg(default=default, help=help, aliases=list(aliases), metadata=metadata)


def joined(value: str | list[str] | None) -> str | None:
    """Join words with commas; None for an empty list."""
    words = [value] if isinstance(value, str) else value or []
    return ",".join(word for each in words for word in each.replace(",", " ").split()) or None
