"""Needs of the features of a run, and what they take away: one check of all pairs, with one message.

An extension says so in its flags (ExtensionFlags.needs and .breaks), a feature of the core in core_features, and a
model's folder where it is read.
"""

from collections.abc import Collection, Iterator, Mapping
from itertools import product
from typing import NamedTuple

from llava_ds.config.arguments import Arguments
from llava_ds.config.data_flags import GROUPINGS
from llava_ds.config.model_flags import adapted_parts, trained_parts
from llava_ds.extensions.base import PROPERTIES


class Feature(NamedTuple):
    """A feature that a run has. name: the flag that asks for it, as it would be written, or words for what a model's
    folder brings; needs: keys of PROPERTIES, and why, which may be empty; breaks: those that it takes away."""

    name: str
    needs: Mapping[str, str] = {}
    breaks: Collection[str] = ()


def features(args: Arguments) -> list[Feature]:
    """The features that flags ask for, and that need or take away a property."""
    own = (feature for flags in args.own.values() for feature in flags.features())
    return [*core_features(args), *(Feature(*feature) for feature in own)]


def clashes(found: Collection[Feature]) -> list[str]:
    """A line for every two features of which one needs what the other takes away: the first such property."""
    lines: dict[tuple[str, str], str] = {}
    for needing, breaking in product(found, found):
        for needed, why in needing.needs.items():
            if needed in breaking.breaks and needing is not breaking:
                both = needing.name.startswith("--") and breaking.name.startswith("--")
                flag = needing.name if needing.name.startswith("--") else breaking.name
                lines.setdefault(
                    (needing.name, breaking.name),
                    f"{needing.name} needs {PROPERTIES[needed]}{f' ({why})' if why else ''}, which {breaking.name} "
                    f"takes away: leave {'one of them' if both else flag} out",
                )
    return list(lines.values())


def core_features(args: Arguments) -> Iterator[Feature]:
    """The features of the core, but for what concerns a single flag."""
    yield from _ways_to_train(args)
    yield from _ways_to_run(args)
    training = args.training
    if args.traits.needs:
        breaks = ("given_answers",) if args.traits.draws else ()
        breaks += ("one_model",) if args.traits.second_model else ()
        yield Feature(f"--objective {training.objective}", args.traits.needs, breaks)
    for name in GROUPINGS:
        if getattr(args.data, name):
            yield Feature(f"--{name} True", {"known_samples": "--tokens_per_micro_batch N evens out work without it"})
    if training.tokens_per_micro_batch == "auto":
        yield Feature("--tokens_per_micro_batch auto", {"known_samples": "a number does not"})
    if training.dry_run:
        yield Feature("--dry_run True", {"known_samples": "it shows the first step"})


def _ways_to_train(args: Arguments) -> Iterator[Feature]:
    """Features of what trains."""
    model = args.model
    if "language_model" not in trained_parts(model) | adapted_parts(model):
        yield Feature("--tune_mm_mlp_adapter or another flag of what trains", breaks=("trained_layers",))
    for flag in ("unfreeze_topk_llm", "unfreeze_topk_vision"):
        if count := getattr(model, flag):
            yield Feature(f"--{flag} {count}", breaks=("trained_layers",))
    if model.mm_native_resolution:
        needs = dict.fromkeys(("whole_sample", "whole_layers"), "images in their own shape are not shared")
        yield Feature("--mm_native_resolution True", needs)


def _ways_to_run(args: Arguments) -> Iterator[Feature]:
    """Features of how it trains."""
    training = args.training
    if training.gradient_checkpointing == "auto":
        yield Feature("--gradient_checkpointing auto", {"whole_layers": "it measures a whole model"})
