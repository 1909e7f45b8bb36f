"""Requirements and effects of a run's features: one check of all pairs, with one message.

Extensions declare them in their flags (ExtensionFlags.needs and .breaks), the core in core_features, and a model's
folder where it is read.
"""

from collections.abc import Collection, Iterator, Mapping
from itertools import product
from typing import NamedTuple

from llava_ds.config.arguments import Arguments
from llava_ds.config.data_flags import GROUPINGS
from llava_ds.config.model_flags import adapted_parts, trained_parts
from llava_ds.extensions.base import PROPERTIES


class Feature(NamedTuple):
    """A feature of a run. name: its flag as written, or words for a property of the model's folder; needs: required
    keys of PROPERTIES, with reasons (possibly empty); breaks: keys that it makes false."""

    name: str
    needs: Mapping[str, str] = {}
    breaks: Collection[str] = ()


def features(args: Arguments) -> list[Feature]:
    """Collect the requested features that need or break a property."""
    own = (feature for flags in args.own.values() for feature in flags.features())
    return [*core_features(args), *(Feature(*feature) for feature in own)]


def clashes(found: Collection[Feature]) -> list[str]:
    """Describe every pair of features where one needs a property that the other breaks (the first such property)."""
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
    """Yield features about which parts train."""
    model = args.model
    if "language_model" not in trained_parts(model) | adapted_parts(model):
        yield Feature("--tune_mm_mlp_adapter or another flag that chooses trained parts", breaks=("trained_layers",))
    for flag in ("unfreeze_topk_llm", "unfreeze_topk_vision"):
        if count := getattr(model, flag):
            yield Feature(f"--{flag} {count}", breaks=("trained_layers",))
    if model.mm_native_resolution:
        yield Feature("--mm_native_resolution True", {"whole_layers": "images in their own shape are not shared"})


def _ways_to_run(args: Arguments) -> Iterator[Feature]:
    """Yield features about how the run trains."""
    training = args.training
    if training.gradient_checkpointing == "auto":
        yield Feature("--gradient_checkpointing auto", {"whole_layers": "it measures a whole model"})
