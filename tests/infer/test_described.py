"""Whatever format a model lies in, it answers alike; what it does not bring is named by flags; nothing is written."""

import json
import shutil
from pathlib import Path

import llavas
import pytest
import torch
import toys
from exporting import RANKS, export

from llava_ds.arguments import ModelArguments
from llava_ds.constants import ConfigError, DataError
from llava_ds.evaluation.files import Given
from llava_ds.evaluation.tasks import read_questions
from llava_ds.geometry import PictureOptions
from llava_ds.infer.described import described
from llava_ds.infer.generate import answer
from llava_ds.infer.load import load_model
from llava_ds.model.build import build_model, plan_model


@pytest.fixture(scope="module")
def toy(tmp_path_factory) -> dict[str, Path]:
    """A random toy as transformers' folder, in LLaVA's format, and as LoRA over its language model; and its parts."""
    folder = tmp_path_factory.mktemp("described")
    base = toys.write_base(folder / "base")
    args = ModelArguments(**base)
    plan = plan_model(args, 512)
    model = build_model(plan, args, {"zero_optimization": {"stage": 0}}, torch.float32, 0, RANKS)
    pictures = PictureOptions(plan.images.size, plan.images.patch_size, plan.images.mean, "pad")
    export(model, plan, args, pictures, folder / "hf")
    export(model, plan, args, pictures, folder / "llava", form="llava")
    projector = {
        f"model.mm_projector.{name.removeprefix('layers.')}": tensor.detach().clone()
        for name, tensor in model.projector.named_parameters()
    }
    llavas.write_idle_adapter(folder / "adapter", base, projector)
    # The parts lie somewhere else than the folders say.
    found = {name: folder / name for name in ("hf", "llava", "adapter")}
    for name, path in base.items():
        found[name] = Path(shutil.move(path, folder / f"moved-{name}"))
    return found


def test_all_formats_answer_alike(toy, tmp_path):
    data = toys.write_data(tmp_path / "data", "iiti")
    prompts = [
        question.prompt
        for question in read_questions("llava", Given(data["data_path"], image_folder=data["image_folder"]), None)
    ]
    before = sorted(toy["llava"].rglob("*")) + sorted(toy["adapter"].rglob("*"))
    tower, base = str(toy["vision_tower"]), str(toy["model_name_or_path"])
    loaded = [
        load_model(toy["hf"]),
        load_model(toy["llava"], moved={"vision_tower": tower}),
        load_model(toy["adapter"], moved={"vision_tower": tower, "model_base": base}),
    ]
    first, *others = (answer(each, prompts, max_new_tokens=5) for each in loaded)
    assert others == [first, first] and len(set(first)) > 1
    assert "LoRA adapter over" in loaded[2].notes[0] and loaded[0].notes == ()
    assert [each.pictures for each in loaded] == [loaded[0].pictures] * 3
    assert sorted(toy["llava"].rglob("*")) + sorted(toy["adapter"].rglob("*")) == before


def test_what_is_not_there_and_what_is_not_needed_is_said(toy, tmp_path):
    tower = {"vision_tower": str(toy["vision_tower"])}
    (tmp_path / "bert").mkdir()
    (tmp_path / "bert" / "config.json").write_text(json.dumps({"model_type": "bert"}))
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / "trainer.json").write_text("{}")
    for path, moved, error, message in (
        (tmp_path / "nowhere", {}, ConfigError, r"--model_path .*nowhere: there is no such folder"),
        (tmp_path, {}, ConfigError, "holds no exported model"),
        (tmp_path / "bert", {}, ConfigError, "its model_type is 'bert', expected llava or"),
        (tmp_path / "torn", {}, DataError, "torn can't be used"),
        (toy["hf"], tower, ConfigError, "--vision_tower: .*hf brings all that it needs"),
        (
            toy["llava"],
            {**tower, "model_name_or_path": "x"},
            ConfigError,
            "--model_name_or_path goes with a checkpoint",
        ),
        (toy["llava"], {}, ConfigError, "--vision_tower"),
        (
            toy["adapter"],
            tower,
            ConfigError,
            r"--model_path .*adapter is a LoRA adapter of .*name its folder by --model_b",
        ),
    ):
        with pytest.raises(error, match=message), described(path, moved):
            pass
