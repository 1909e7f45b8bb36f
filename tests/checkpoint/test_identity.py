"""A resumed run has to start from the same models, wherever their folders lie and whichever of them there are."""

import json
import shutil
from pathlib import Path

import llavas
import torch
import toys

from llava_ds.checkpoint.state import TRAINER, RunIdentity, saved_identity
from llava_ds.model.folders import take_from_model

CONFIG = {"zero_optimization": {"stage": 3}}


def identity(given: dict[str, object]) -> RunIdentity:
    args, _ = take_from_model(llavas.arguments(given))
    return RunIdentity.of(args, "data", 2, CONFIG)


def test_a_model_that_brings_its_tower_has_an_identity(tmp_path):
    base = toys.write_base(tmp_path / "base")
    flags = llavas.write_hf(tmp_path / "hf", base, llavas.hf_model(base))
    first = identity(flags)
    assert first.flags["vision_tower"] is None and first.flags["model_base"] is None
    shutil.copytree(tmp_path / "hf", tmp_path / "elsewhere")
    assert identity({"model_name_or_path": str(tmp_path / "elsewhere")}) == first
    with (tmp_path / "hf" / "config.json").open("a") as file:
        file.write("\n")
    assert list(identity(flags).differences(vars(first))) == ["model_name_or_path"]


def test_the_base_under_an_adapter_belongs_to_it(tmp_path):
    base = toys.write_base(tmp_path / "base")
    flags = llavas.write_idle_adapter(tmp_path / "adapter", base, {"model.mm_projector.0.bias": torch.ones(32)})
    first = identity(flags)
    assert first.flags["model_base"] is not None
    config = Path(base["model_name_or_path"]) / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "rope_theta": 5e5}))
    assert list(identity(flags).differences(vars(first))) == ["model_base"]


def test_what_a_run_chose_for_itself_is_read_from_its_newest_checkpoint(tmp_path):
    for step, tokens in ((2, 640), (10, 704), (4, 640)):
        (tmp_path / f"checkpoint-{step}").mkdir()
        trainer = {"identity": {"flags": {"tokens_per_micro_batch": tokens}}}
        (tmp_path / f"checkpoint-{step}" / TRAINER).write_text(json.dumps(trainer))
    assert saved_identity("auto", tmp_path)["flags"] == {"tokens_per_micro_batch": 704}
    assert saved_identity(str(tmp_path / "checkpoint-2"), tmp_path / "other")["flags"] == {
        "tokens_per_micro_batch": 640
    }
    (tmp_path / "checkpoint-10" / TRAINER).write_text("{")  # damaged
    assert saved_identity("auto", tmp_path)["flags"] == {"tokens_per_micro_batch": 640}
    assert saved_identity("never", tmp_path) == saved_identity("auto", tmp_path / "other") == {}
