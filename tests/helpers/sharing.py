"""Toy runs whose ranks share samples or matrices, compared with one rank. The optimizer is SGD without momentum, so
that weights differ exactly as gradients do.
"""

import json
import zlib
from pathlib import Path

import pytest
import torch
import toys
from extension_there import if_there
from launching import ds_config, losses, run_many, toy_run
from safetensors.torch import load_file

from llava_ds.files.writing import run_folder

STEPS, BATCH, RATE, TOLERANCE = 5, 8, 0.1, 1e-6
LONG = 3000  # tokens of one sample, at least
# With torn images. At a rate of 0.1 this loss falls so steeply that one rank alone, with other micro-batches, is 1.6e-6
# away from itself after five steps; at 0.02 every layout stays within 2e-7.
TORN = {"eval_fraction": 0.2, **if_there("samples", sample_steps=STEPS), "learning_rate": 0.02, "mm_projector_lr": 0.02}
TRAINED_TOWER = {"mm_tunable_parts": "mm_vision_tower,mm_mlp_adapter,mm_language_model"}
# Additional DeepSpeed JSON, instead of a stage.
OFFLOAD = {
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    "zero_force_ds_cpu_optimizer": False,
}


def write_data(folder: Path) -> dict[str, dict[str, str]]:
    """Toy data by the first word of a run's name: a long sample, videos, broken images, or answer weights with some
    broken images."""
    data = {
        name: toys.write_data(folder / name, "ititiiittiittitttttttttiii" * 2)
        for name in ("plain", "video", "torn", "weighed")
    }
    records = json.loads((folder / "plain/data.json").read_text())
    records[3]["conversations"][1]["value"] = " ".join(["yes no two red cat"] * (LONG // 5))
    (folder / "plain/data.json").write_text(json.dumps(records))

    records = json.loads((folder / "video/data.json").read_text())
    frames = [record["image"] for record in records if "image" in record]
    for i, record in enumerate(records):
        if "image" in record and i % 2:
            record["video"] = frames[i % 3 : i % 3 + 2 + i % 4]
            del record["image"]
            record["conversations"][0]["value"] = record["conversations"][0]["value"].replace("<image>", "<video>")
    (folder / "video/data.json").write_text(json.dumps(records))
    assert sum("video" in record for record in records) > 5

    records = json.loads((folder / "weighed/data.json").read_text())
    for i, record in enumerate(records[::2]):
        record["conversations"][1]["weight"] = (0.5, 0.25, 1.5)[i % 3]
    (folder / "weighed/data.json").write_text(json.dumps(records))

    for name, every in (("torn", 4), ("weighed", 6)):
        for path in sorted((folder / name / "images").iterdir())[::every]:
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])  # a whole header and half a body
    return data


def sgd(folder: Path, stage: int | dict) -> Path:
    config = stage if isinstance(stage, dict) else json.loads(Path(ds_config(stage)).read_text())
    optimizer = {"type": "SGD", "params": {"lr": "auto"}}
    text = json.dumps({**config, "optimizer": optimizer, "zero_allow_untested_optimizer": True})
    path = folder / f"sgd-{zlib.crc32(text.encode())}.json"
    path.write_text(text)
    return path


def train_all(folder: Path, data: dict, runs: dict[str, tuple[int, int, dict]]) -> dict[str, Path]:
    base = {"model_name_or_path": str(folder / "base/llama"), "vision_tower": str(folder / "base/clip")}
    more = {
        "learning_rate": RATE, "mm_projector_lr": RATE, "lr_scheduler_type": "constant", "max_steps": STEPS,
        "train_batch_size": BATCH, "per_device_train_batch_size": BATCH, "max_bad_fraction": 0.5,
    }  # fmt: skip
    for ranks in sorted({ranks for ranks, *_ in runs.values()}):
        wanted = {name: run for name, run in runs.items() if run[0] == ranks}
        todo = [
            toy_run(base | data[name.split("-")[0]], folder / name, sgd(folder, stage), **{**more, **flags})
            | {"model_max_length": 2 * LONG}
            for name, (_, stage, flags) in wanted.items()
        ]
        run_many(ranks, folder / f"launch-{ranks}-{len(runs)}", todo)
    return {name: folder / name for name in runs}


def rows(output_dir: Path, name: str = "metrics.jsonl") -> list[dict]:
    return [json.loads(line) for line in (run_folder(output_dir) / name).read_text().splitlines()]


def weights_of(output_dir: Path) -> dict[str, torch.Tensor]:
    adapter = output_dir / "adapter_model.safetensors"
    return load_file(adapter if adapter.exists() else output_dir / "model.safetensors")


def check_same(one: Path, shared: Path) -> None:
    for key in ("samples", "tokens", "supervised_tokens", "broken_samples"):
        assert [row[key] for row in rows(one)] == [row[key] for row in rows(shared)], key
    assert len(losses(one)) == STEPS
    assert losses(shared) == pytest.approx(losses(one), rel=TOLERANCE, abs=0)
    expected, found = weights_of(one), weights_of(shared)
    assert expected.keys() == found.keys()
    rate = rows(one)[0]["lr"][0]
    for key, weight in expected.items():
        # What five gradients together differ by, and one rounding of the weight itself.
        allowed = rate * STEPS * TOLERANCE + torch.finfo(weight.dtype).eps * weight.abs()
        assert ((weight - found[key]).abs() <= allowed).all(), key


def relative_difference(one: Path, other: Path) -> float:
    """Root of the mean square over all weights."""
    expected, found = weights_of(one), weights_of(other)
    squares = [
        ((expected[key].float() - found[key].float()).square().sum(), expected[key].float().square().sum())
        for key in expected
    ]
    different, whole = map(sum, zip(*squares))
    return float((different / whole).sqrt())
