"""What a model can't be trained with is the only reason of a refusal, before further flags are asked for."""

from pathlib import Path

import pytest
import toys
from extension_there import if_there, needs_extension
from ready_models import write_ready

from llava_ds.constants import ConfigError
from llava_ds.train.early_flags import read_flags

ROOT = Path(__file__).parents[3]
PLAIN = ["--deepspeed_config", "zero2", "--output_dir", "out", "--data_path", str(ROOT / "pyproject.toml")]


@pytest.fixture(scope="module")
def ready(tmp_path_factory) -> list[str]:
    return ["--model_name_or_path", write_ready(tmp_path_factory.mktemp("ready"))["model_name_or_path"]]


@pytest.fixture(scope="module")
def composed(tmp_path_factory) -> list[str]:
    base = toys.write_base(tmp_path_factory.mktemp("composed"))
    return [word for name, value in base.items() for word in (f"--{name}", str(value))]


def refusal(argv: list[str]) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        read_flags([*PLAIN, *argv])
    return str(caught.value).splitlines()


@pytest.mark.parametrize(
    ("flags", "begins", "end"),
    [
        *(
            pytest.param(flags, "a ready model needs MLPs without routers ", end, marks=needs_extension("mixtures"))
            for flags, end in (
                ("--ep_size 2 --eval_data_split x", "leave --ep_size 2 out"),
                ("--moe_enable True --top_k_experts 9", "--moe_enable True out"),
            )
        ),
    ],
)
def test_a_ready_models_reason_comes_alone(ready, flags, begins, end):
    (line,) = refusal([*ready, *flags.split()])
    assert line.startswith(begins) and line.endswith(end)


@needs_extension("mixtures")
def test_every_reason_that_can_not_be_helped_is_given(ready):
    lines = refusal([*ready, "--ep_size", "2", "--version", "v1", "--eval_data_split", "x"])
    assert [line.partition(":")[0].partition(" (")[0] for line in lines] == [
        "a ready model needs MLPs without routers", "--version"
    ]  # fmt: skip


@needs_extension("rl")
def test_a_folder_of_another_kind_is_refused_for_that(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "mllama"}')
    lines = refusal(["--model_name_or_path", str(tmp_path), "--objective", "grpo"])
    assert "mllama" in lines[0] and "--reward_funcs" in lines[1]


def test_flags_that_a_model_can_have_are_asked_for(composed):
    if if_there("rl", objective="grpo"):
        assert "needs --reward_funcs" in "\n".join(refusal([*composed, "--objective", "grpo"]))
