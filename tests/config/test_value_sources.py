"""Messages about values that nobody wrote on the command line say where these come from."""

import json

import pytest
from known_flags import needs

from llava_ds.config.parsing import explained, parse_arguments, recipe_values, tiny_defaults
from llava_ds.config.recipes import RECIPES
from llava_ds.constants import ConfigError
from llava_ds.train.start import name_sources

PLAIN = ["--output_dir", "out", "--deepspeed_config", "zero2"]


def refusal(argv: list[str], **more: object) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        parse_arguments(argv, **more)
    return str(caught.value).splitlines()


def test_a_recipes_values_are_named_as_its_own(tmp_path):
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("train_batch_size: 0\neval_steps: 2\nwarmup_steps: 2.5\n")
    lines = refusal([*PLAIN, "--recipe", str(recipe), "--warmup_steps", "1.5"])
    named = {f"--{flag} is from --recipe {recipe}" for flag in ("eval_steps 2", "train_batch_size 0")}
    assert set(lines[-2:]) == named
    assert not any("2.5" in line for line in lines)  # the command line's counts


@pytest.mark.parametrize(
    ("flags", "name", "value"),
    [
        (["--eval_data_path", "x.json", "--train_batch_size", "0"], None, None),
        (["--eval_strategy", "epoch", "--eval_steps", "0"], None, None),
        (["--loss_reduction", "micro_batch", "--tokens_per_micro_batch", "9", "--eval_data_split", "x"], None, None),
        (["--image_grid_pinpoints", "[[2, 2]]"], "image_aspect_ratio", "pad"),
    ],
)
def test_the_tiny_models_recipe_is_named(flags, name, value):
    argv = [*PLAIN, *flags]
    lines = refusal(argv, defaults=tiny_defaults(argv, RECIPES))
    sources = [line for line in lines if line.endswith("is from the tiny model's recipe")]
    assert sources == ([] if name is None else [f"--{name} {value} is from the tiny model's recipe"])


def test_a_flag_is_named_once_and_whole():
    sources = {"eval_steps": "--eval_steps 2 is from --recipe r", "eval": "never"}
    message = "--eval_steps 3 and --eval_steps, not --no-eval_steps"
    assert explained(message, sources) == f"{message}\n--eval_steps 2 is from --recipe r"
    assert explained("nothing", sources) == "nothing"
    assert recipe_values(["--recipe_of", "x"], {"seed": 1}) == {"seed": "--seed 1 is from the tiny model's recipe"}


@needs("ep_size")
def test_values_of_the_json_are_named_as_its_own(tmp_path):
    path = tmp_path / "ds.json"
    config = {
        "moe_expert_parallel_size": 3,
        "optimizer": {"type": "AdamW", "params": {"lr": 0, "betas": "auto"}},
    }
    path.write_text(json.dumps(config))
    argv = ["--deepspeed_config", str(path), "--eval_fraction", "0.5"]
    message = "--ep_size 3 does not divide 1 ranks; --learning_rate is 0; --adam_beta1; --eval_fraction"
    assert name_sources(argv, message).splitlines() == [
        message,
        f"--ep_size follows from moe_expert_parallel_size 3 in {path}",
        f"--learning_rate follows from optimizer.params.lr 0 in {path}",
    ]
    assert name_sources(["--nonsense"], "as it was") == "as it was"
