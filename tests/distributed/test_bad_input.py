"""Bad input ends a run before any model is built: one clear message, exit code 2, no traceback."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import toys
from launching import TRAIN, command_line, ds_config, launch

from llava_ds.config.parsing import parse_arguments

EVERY_DAY = ["not_llava"]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory) -> dict[str, subprocess.CompletedProcess]:
    """The output of each bad run, by name; one goes through the launcher on two ranks."""
    return run_all(tmp_path_factory.mktemp("bad"), EVERY_DAY)


@pytest.fixture(scope="module")
def more_outcomes(tmp_path_factory) -> dict[str, subprocess.CompletedProcess]:
    """The same of all others."""
    return run_all(tmp_path_factory.mktemp("worse"), [name for name in MESSAGES if name not in EVERY_DAY])


def run_all(folder: Path, names: list[str]) -> dict[str, subprocess.CompletedProcess]:
    base = toys.write_base(folder / "base")
    data = toys.write_data(folder / "data", "iitt")
    good = {
        **base,
        **data,
        "deepspeed_config": ds_config(3),
        "output_dir": folder / "out",
        "cache_dir": folder / "cache",
        "model_max_length": 512,
    }
    coco = folder / "coco.json"
    coco.write_text(json.dumps({"images": [], "annotations": []}))
    clipped = folder / "clipped.json"
    clipped.write_text(json.dumps({"gradient_clipping": 1.0, "train_micro_batch_size_per_gpu": 4}))
    bad = {
        "unknown_flag": {**good, "learning_rat": 1e-3},
        "no_image_folder": {**good, "image_folder": folder / "nowhere"},
        "not_llava": {**good, "data_path": coco},
        "conflict": {
            **good,
            "deepspeed_config": clipped,
            "max_grad_norm": 0.5,
            "per_device_train_batch_size": 8,
        },
    }
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}

    def run(flags: dict) -> subprocess.CompletedProcess:
        command = [sys.executable, str(TRAIN), *command_line(flags)]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)

    alone = {name: bad[name] for name in names if name != "not_llava"}
    with ThreadPoolExecutor(2) as pool:
        done = dict(zip(alone, pool.map(run, alone.values())))
    if "not_llava" in names:
        done["not_llava"] = launch(2, TRAIN, *command_line(bad["not_llava"]))
    assert not (folder / "out").exists()
    return done


MESSAGES = {
    "unknown_flag": ["unknown flag --learning_rat: did you mean --learning_rate?"],
    "no_image_folder": ["--image_folder", "nowhere: no such folder"],
    "not_llava": ["coco.json holds one object, expected a JSON list of records"],  # on two ranks, by the launcher
    "conflict": [
        "gradient_clipping is 1.0 in the DeepSpeed JSON but --max_grad_norm is 0.5",
        "train_micro_batch_size_per_gpu is 4 in the DeepSpeed JSON but --per_device_train_batch_size is 8",
    ],
}


def test_help_lists_the_flags_of_every_section(capsys):
    with pytest.raises(SystemExit) as ended:
        parse_arguments(["--help"])
    assert ended.value.code == 0
    said = capsys.readouterr().out
    for flag in ("--recipe", "--vision_tower", "--image_folder", "--deepspeed_config", "--lazy_preprocess"):
        assert flag in said


@pytest.mark.parametrize("name", EVERY_DAY)
def test_one_clear_message_and_exit_code_2(outcomes, name):
    check_message(outcomes[name], name)


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in MESSAGES if name not in EVERY_DAY])
def test_more_clear_messages_and_exit_code_2(more_outcomes, name):
    check_message(more_outcomes[name], name)


@pytest.mark.long
def test_what_rank_0_alone_writes_ends_all_ranks_where_it_fails(tmp_path):
    flags = {**toys.write_base(tmp_path / "base"), **toys.write_data(tmp_path / "data", "iitt")}
    out = tmp_path / "out"
    (out / ".data_files.parquet.tmp").mkdir(parents=True)  # what is written comes under this name first
    flags |= {"deepspeed_config": ds_config(2), "output_dir": out, "cache_dir": tmp_path / "cache"}
    done = launch(2, TRAIN, *command_line({**flags, "model_max_length": 512}), timeout_s=120)
    assert done.returncode == 2 and "Traceback" not in done.stdout + done.stderr, done.stdout + done.stderr
    assert f"can't be written to {out}: Is a directory" in done.stderr and "another --output_dir" in done.stderr


def check_message(done: subprocess.CompletedProcess, name: str) -> None:
    assert done.returncode == 2, done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    assert done.stderr.count("run/train.py: error") == 1
    first = done.stderr.splitlines()[0]  # nothing of a library's comes before what is ours
    assert not any(theirs in done.stdout + first for theirs in ("gemm_4bit", "real_accelerator")), first
    for message in MESSAGES[name]:
        assert message in done.stderr
