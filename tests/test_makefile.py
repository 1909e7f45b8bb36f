"""The commands of the Makefile's targets: the flags exist, and a model named on make's command line reaches them."""

import re
import shlex
import subprocess

import pytest
from launching import ROOT

from llava_ds.config.parsing import build_parser

OWN = ["MODEL=/models/vicuna/", "VISION_TOWER=/models/clip", "DATA=/data/a b.json", "IMAGES=/data/images"]


def commands(*arguments: str) -> list[list[str]]:
    """The flags of each run/train.py command that make would run."""
    done = subprocess.run(["make", "-n", *arguments], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    text = done.stdout.replace("\\\n", " ")
    return [shlex.split(line.split("run/train.py", 1)[1]) for line in text.splitlines() if "run/train.py" in line]


def parsed(flags: list[str]) -> dict[str, object]:
    namespace, unknown = build_parser().parse_known_args(flags)
    assert not unknown
    return vars(namespace)


def test_the_tiny_targets(tmp_path):
    missing = f"PROJECTOR={tmp_path}/mm_projector.bin"  # so that fine-tuning starts with stage 1
    stage1, stage2 = commands("finetune", missing, "ARGS=--learning_rate 0.5")
    assert parsed(stage1)["deepspeed_config"] == "ds_configs/zero2.json"
    assert parsed(stage1)["learning_rate"] != 0.5  # ARGS are stage 2's
    stage2 = parsed(stage2)
    assert stage2["deepspeed_config"] == "ds_configs/zero3.json"
    assert stage2["pretrain_mm_mlp_adapter"] == f"{tmp_path}/mm_projector.bin"
    assert stage2["learning_rate"] == 0.5
    assert stage2["model_name_or_path"] is None


def test_real_weights_are_trained_from_the_written_folder(tmp_path):
    [stage] = map(parsed, commands("real", f"REAL={tmp_path}/real", "ARGS=--learning_rate 0.5"))
    assert (ROOT / stage["recipe"]).is_file()
    assert stage["data_path"] == f"{tmp_path}/real/train.json"
    assert stage["model_name_or_path"] == f"{tmp_path}/real/model"
    assert stage["output_dir"] == f"{tmp_path}/real-finetune"
    assert stage["learning_rate"] == 0.5


@pytest.mark.parametrize(
    ("target", "recipe"), [("pretrain", "llava-v1.5-7b-pretrain"), ("finetune", "llava-v1.5-7b-f")]
)
def test_a_model_of_ones_own(target, recipe, tmp_path):
    projector = tmp_path / "mm_projector.bin"
    projector.touch()
    [flags] = commands(target, *OWN, f"PROJECTOR={projector}")
    flags = parsed(flags)
    assert flags["model_name_or_path"] == "/models/vicuna/"
    assert flags["vision_tower"] == "/models/clip"
    assert flags["data_path"] == "/data/a b.json"
    assert flags["image_folder"] == "/data/images"
    assert flags["recipe"].startswith(f"run/recipes/{recipe}")
    assert flags["output_dir"] == f"output/vicuna-{target}"


def test_questions_for_the_score_give_the_eval_loss_of_stage_2(tmp_path):
    data, projector = tmp_path / "held out.json", tmp_path / "mm_projector.bin"
    for path in (data, projector):
        path.touch()
    given = ("finetune", *OWN, f"PROJECTOR={projector}", f"EVAL_DATA={data}")
    [flags] = commands(*given)
    flags = parsed(flags)
    assert (flags["eval_data_path"], flags["eval_steps"]) == (str(data), 0.1)
    [elsewhere] = commands(*given, "EVAL_IMAGES=/data/others")  # training has one folder of images
    assert parsed(elsewhere)["eval_data_path"] is None
    if not (ROOT / "run" / "evaluate.py").exists():  # its extension was deleted
        return
    done = subprocess.run(
        ["make", "-n", "evaluate", *OWN, f"EVAL_DATA={data}"], cwd=ROOT, capture_output=True, text=True
    )
    assert "--image_folder '/data/images'" in done.stdout


def test_a_model_without_a_tower_is_refused():
    done = subprocess.run(["make", "-n", "pretrain", OWN[0]], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode != 0
    assert re.search(r"MODEL needs VISION_TOWER", done.stderr)
