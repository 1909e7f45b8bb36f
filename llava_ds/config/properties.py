"""Check that no feature of a run breaks a property that another feature needs.

Extensions declare needed and broken properties in their flags (ExtensionFlags.needs and .breaks), and the core in
core_features.
"""

from collections.abc import Collection, Iterator, Mapping
from itertools import product
from typing import NamedTuple

from llava_ds.config.arguments import Arguments
from llava_ds.config.data_flags import GROUPINGS
from llava_ds.config.model_flags import adapted_parts, trained_parts
from llava_ds.extensions.base import PROPERTIES


class Feature(NamedTuple):
    """A feature of a run. name: the flag with its value, or a description; needs: the keys of PROPERTIES that it needs,
    with the reasons ("" for none); breaks: the keys of PROPERTIES that do not hold with it."""

    name: str
    needs: Mapping[str, str] = {}
    breaks: Collection[str] = ()


def features(args: Arguments) -> list[Feature]:
    """Return the features of the run that need or break a property."""
    own = (feature for flags in args.own.values() for feature in flags.features())
    return [*core_features(args), *(Feature(*feature) for feature in own)]


def clashes(found: Collection[Feature]) -> list[str]:
    """Return a line for every pair of features of which one breaks a property that the other needs. Names the first."""
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
    """Yield the features of the core that concern more than one flag."""
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
    """Yield the features that concern the trained parts."""
    model = args.model
    if "language_model" not in trained_parts(model) | adapted_parts(model):
        yield Feature("--tune_mm_mlp_adapter or another flag that chooses trained parts", breaks=("trained_layers",))
    for flag in ("unfreeze_topk_llm", "unfreeze_topk_vision"):
        if count := getattr(model, flag):
            yield Feature(f"--{flag} {count}", breaks=("trained_layers",))
    if model.mm_native_resolution:
        yield Feature("--mm_native_resolution True", {"whole_layers": "images in their own shape are not shared"})


def _ways_to_run(args: Arguments) -> Iterator[Feature]:
    """Yield the features that concern memory and speed."""
    training = args.training
    if training.gradient_checkpointing == "auto":
        yield Feature("--gradient_checkpointing auto", {"whole_layers": "it measures a whole model"})
