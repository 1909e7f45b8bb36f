"""The declaration of a flag: one dataclass field with its default, its help text and all that code asks about it."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

from llava_ds.config.hf_argparser import HfArg

# Titles under which --help shows the core's flags, in its order; an extension's group has its name.
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


@dataclass(frozen=True)
class Flag:
    """All that code asks about a flag beside its type, bounds, default and help.

    group: a key of GROUPS, or an extension's name.
    path: None for a flag that is no path. model: a model's folder, which might be mistaken for a name on the hub;
    pattern: a file or folder, or a pattern like shard-*.tar; output: a folder that can be created; unchecked: one that
    is looked at later.
    remote: whether it may also be the URL of an object in a store.
    only_to_train: whether the path is checked for training alone, and not for scripts that only read the flags.
    resume: the value that a resumed run may have. compared: that of the checkpoint, unless --allow_changed_flags names
    the flag; free: any, for it gives the same model (of a path: what lies there is compared); rewind: any, unless the
    run may go back to a checkpoint, which makes it decide about steps; layout: any, where the loss does not depend on
    the layout; placement: any, for the layout stays.
    per_machine: whether each machine may have another value. A path may be another on each.
    shares_samples: whether it is a number of ranks with the same samples.
    of_micro_batch: whether the loss depends on the layout by another value than the default.
    goes_with: of an extension's flag, the values that read it of those that the extension adds to a flag of the core.
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
    """Two functions that declare fields as flags of a group; a resumed run may freely change those of the second.

    about: more fields of Flag that all of them have.
    """
    return partial(_declare, group=group, **about), partial(_declare, group=group, resume="free", **about)


def _declare(
    default: object, help: str, *, aliases: tuple[str, ...] = (), argparse: dict | None = None, **about: object
) -> object:
    """A field that is a flag. about: the fields of Flag; argparse: more options of add_argument."""
    metadata = {**(argparse or {}), "flag": Flag(**about)}
    return HfArg(default=default, help=help, aliases=list(aliases), metadata=metadata)


def joined(value: str | list[str] | None) -> str | None:
    """Words with commas between them; None for none."""
    words = [value] if isinstance(value, str) else value or []
    return ",".join(word for each in words for word in each.replace(",", " ").split()) or None
