"""lmms-eval's llava_hf gives an exported folder the answers that run/evaluate.py gives it, by the documented recipe.

It needs lmms-eval in an environment of its own: make lmms-eval makes that, and runs this.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import toys
from exporting import RANKS, export
from launching import ROOT, environment

from llava_ds.config.arguments import ModelArguments
from llava_ds.engine.construct import build_model
from llava_ds.geometry import ImageOptions
from llava_ds.model.open.model_plan import plan_model
from llava_ds.tiny import CLIP_PATH, LLAMA_PATH

NUM_QUESTIONS = 60


@pytest.fixture
def lmms_eval() -> Path:
    """The folder of a virtual environment with lmms-eval in it."""
    if "LMMS_EVAL" not in os.environ:
        pytest.skip("LMMS_EVAL names no environment with lmms-eval: make lmms-eval makes one")
    folder = Path(os.environ["LMMS_EVAL"])
    assert (folder / "bin" / "python").is_file(), f"LMMS_EVAL={folder}: there is no bin/python"
    return folder


def documented(language: str) -> str:
    """The one block of docs/benchmarks.md in a language; of bash the last."""
    section = (ROOT / "docs" / "benchmarks.md").read_text().split("## lmms-eval", 1)[1]
    return re.findall(rf"^```{language}\n(.*?)^```", section, re.S | re.M)[-1]


def write_model(folder: Path, ratio: str) -> None:
    """An exported folder of the tiny model's parts, which speak in words, with a random projector between them."""
    torch.manual_seed(0)
    merge_type = "spatial_unpad" if ratio == "anyres" else "flat"
    args = ModelArguments(
        model_name_or_path=str(LLAMA_PATH), vision_tower=str(CLIP_PATH), mm_patch_merge_type=merge_type
    )
    plan = plan_model(args, 512)
    model = build_model(plan, args, {"zero_optimization": {"stage": 0}}, torch.float32, 0, RANKS)
    spec = plan.images
    export(
        model,
        plan,
        args,
        ImageOptions(spec.size, spec.patch_size, spec.mean, ratio, merge_type=merge_type),
        folder,
    )


def write_questions(folder: Path) -> None:
    """questions.json and images/, of many sizes, one question to each."""
    given = toys.write_data(folder, "i" * NUM_QUESTIONS)
    records = json.loads(Path(given["data_path"]).read_text())
    for record in records:
        record["conversations"] = record["conversations"][:2]
    (folder / "questions.json").write_text(json.dumps(records))


@pytest.mark.long
@pytest.mark.parametrize("ratio", ["pad", "anyres"])
def test_its_answers_are_those_of_evaluate(ratio, lmms_eval, tmp_path):
    write_model(tmp_path / "output" / "mine", ratio)
    write_questions(tmp_path)
    (tmp_path / "mytask").mkdir()
    (tmp_path / "mytask" / "mine.yaml").write_text(documented("yaml"))
    (tmp_path / "mytask" / "mine.py").write_text(documented("python"))
    (tmp_path / ".lmms").symlink_to(lmms_eval)

    command = documented("bash")
    if not torch.cuda.is_available():
        command = command.replace("DEVICE=cuda:0", "DEVICE=cpu")
    apart = {**environment(), "HF_HOME": str(tmp_path / "hub")}
    apart.pop("PYTHONPATH", None)  # an environment of its own
    done = subprocess.run(
        ["bash", "-euc", command], cwd=tmp_path, env=apart, capture_output=True, text=True, timeout=1200
    )
    assert done.returncode == 0, done.stdout + done.stderr
    [samples] = (tmp_path / "lmms-logs").glob("*/*_samples_mine.jsonl")
    theirs = {row["doc_id"]: row["filtered_resps"] for row in map(json.loads, samples.read_text().splitlines())}

    flags = ["--model_path", "output/mine", "--data_path", "questions.json", "--image_folder", "images"]
    flags += ["--batch_size", "1", "--max_new_tokens", "64", "--output", "ours.json"]
    done = subprocess.run(
        [sys.executable, str(ROOT / "run" / "evaluate.py"), *flags],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    ours = [json.loads(line)["text"] for line in (tmp_path / "ours.jsonl").read_text().splitlines()]
    assert [theirs[i].strip() for i in range(NUM_QUESTIONS)] == ours
    assert len(set(ours)) > 5 and "" not in ours
