"""Every pair of features, from flags and DeepSpeed JSON alone: pairs stay taken, or refused.

goldens/pairs.json has a reason for each refused pair. Only whether a pair is refused is compared, so that a message may
get better. After a change, write the file anew, and read the difference:

    PYTHONPATH=.:tests/helpers .venv/bin/python tests/config/test_pairs_of_features.py

Names are sorted, so that a new feature only adds lines.
"""

import itertools
import json
from pathlib import Path

import pytest
from toys import language_model_config

from llava_ds.config.parsing import parse_arguments
from llava_ds.constants import ConfigError
from llava_ds.engine.ds_config.parallel import check_model, with_axes
from llava_ds.engine.ds_config.resolve import read_ds_config, resolve_ds_config
from llava_ds.extensions.active import active

ROOT = Path(__file__).parents[2]
GOLDENS = Path(__file__).parent / "goldens" / "pairs.json"
BASE = {"model_name_or_path": ROOT, "vision_tower": ROOT, "data_path": ROOT / "setup.py", "output_dir": "o"}
BASE |= {"learning_rate": 1e-3, "train_batch_size": 8, "image_folder": ROOT}
EVAL = {"eval_fraction": 0.1, "eval_steps": 10}
FEATURES: dict[str, dict[str, object]] = {
    "zero0": {"stage": 0},
    "zero3": {"stage": 3},
    "offload": {"stage": "3_offload"},
    "bf16": {"bf16": True},
    "auto tokens": {"tokens_per_micro_batch": "auto"},
    "eval loss": EVAL,
    "recomputed": {"gradient_checkpointing": True},
    "weights only": {"save_only_model": True},
    "projector alone": {"tune_mm_mlp_adapter": True},
    "last layers": {"freeze_backbone": True, "unfreeze_topk_llm": 1},
    "across epochs": {"steps_across_epochs": True},
    "by modality": {"group_by_modality_length": True},
    "micro-batch loss": {"loss_reduction": "micro_batch"},
}
# Those of extensions, which may have been deleted.
for file in sorted((ROOT / "tests" / "extensions").glob("*/features.json")):
    FEATURES |= json.loads(file.read_text())
ZERO2 = 2


def verdict(*names: str) -> str:
    """The first reason against these features together; "" if there is none."""
    flags = {name: value for feature in names for name, value in FEATURES[feature].items()}
    path = ROOT / "ds_configs" / f"zero{flags.pop('stage', ZERO2)}.json"
    words = [word for name, value in {**BASE, **flags}.items() for word in (f"--{name}", str(value))]
    try:
        args, _ = parse_arguments(["--deepspeed_config", str(path), *words])
        raw = read_ds_config(path)
        args = with_axes(args, raw)
        check_model(args, language_model_config(num_attention_heads=4, num_key_value_heads=2))
        resolved = resolve_ds_config(raw, args, dp=2, hidden_size=32, num_steps=100)
        own = resolved.args.own  # others ask what is installed
        active([name for name, flags in own.items() if flags.axis is not None]).check(resolved)
    except ConfigError as error:
        return str(error).replace(str(ROOT), "").splitlines()[0]
    return ""


def contradicts(first: str, second: str) -> bool:
    """True for two values of one flag, which no command line can have together."""
    a, b = FEATURES[first], FEATURES[second]
    return any(a[name] != b[name] for name in a.keys() & b.keys())


def verdicts() -> dict[str, str]:
    names = sorted(FEATURES)
    alone = {name: verdict(name) for name in names}
    pairs = {f"{a} + {b}": verdict(a, b) for a, b in itertools.combinations(names, 2) if not contradicts(a, b)}
    return {**alone, **pairs}


def by_names(found: dict[str, str]) -> dict[frozenset[str], str]:
    """Verdicts by the names in a pair, of the features that there are."""
    pairs = {frozenset(pair.split(" + ")): reason for pair, reason in found.items()}
    return {names: reason for names, reason in pairs.items() if names <= FEATURES.keys()}


def test_every_pair_is_taken_or_refused_as_before():
    before, now = by_names(json.loads(GOLDENS.read_text())), by_names(verdicts())
    other = [
        f"{' + '.join(names)}: {now[names] or 'taken'}" for names in before if bool(before[names]) != bool(now[names])
    ]
    assert now.keys() == before.keys() and not other, "\n".join(other)


@pytest.mark.parametrize("name", FEATURES)
def test_a_feature_alone_is_taken_or_says_what_it_needs(name):
    alone = json.loads(GOLDENS.read_text())[name]
    assert alone == "" or "--" in alone or "needs" in alone, alone


if __name__ == "__main__":
    GOLDENS.write_text(json.dumps(verdicts(), indent=1) + "\n")
