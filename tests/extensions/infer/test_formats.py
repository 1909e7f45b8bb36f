"""Whatever format a model lies in, it answers alike; what it does not bring is named by flags; nothing is written."""

import json
import shutil
from pathlib import Path

import llavas
import pytest
import torch
import toys
from exporting import RANKS, export

from llava_ds.config.arguments import ModelArguments
from llava_ds.constants import ConfigError, DataError
from llava_ds.data.collate import LoadedSample, collate
from llava_ds.engine.construct import build_model
from llava_ds.extensions.benchmarks.benchmark_files import Given
from llava_ds.extensions.benchmarks.tasks import read_questions
from llava_ds.extensions.infer.formats import open_model
from llava_ds.extensions.infer.generate import answer
from llava_ds.extensions.infer.load import load_model
from llava_ds.extensions.table import EXTENSIONS
from llava_ds.geometry import ImageOptions, media_layout
from llava_ds.model.open.hf import embed_batch
from llava_ds.model.open.model_plan import plan_model


@pytest.fixture(scope="module")
def toy(tmp_path_factory) -> dict[str, Path]:
    """A random toy as transformers' folder, in LLaVA's format, and as LoRA over its language model; and its parts."""
    folder = tmp_path_factory.mktemp("described")
    base = toys.write_base(folder / "base")
    args = ModelArguments(**base)
    plan = plan_model(args, 512)
    model = build_model(plan, args, {"zero_optimization": {"stage": 0}}, torch.float32, 0, RANKS)
    image_options = ImageOptions(plan.images.size, plan.images.patch_size, plan.images.mean, "pad")
    export(model, plan, args, image_options, folder / "hf")
    export(model, plan, args, image_options, folder / "llava", form="llava")
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
    ]
    if "lora" in EXTENSIONS:
        loaded.append(load_model(toy["adapter"], moved={"vision_tower": tower, "model_base": base}))
        assert "LoRA adapter over" in loaded[2].notes[0]
    first, *others = (answer(each, prompts, max_new_tokens=5) for each in loaded)
    assert all(each == first for each in others) and len(set(first)) > 1 and loaded[0].notes == ()
    assert all(each.image_options == loaded[0].image_options for each in loaded)
    assert sorted(toy["llava"].rglob("*")) + sorted(toy["adapter"].rglob("*")) == before


@pytest.mark.parametrize("family", toys.MIXTURES)
def test_experts_are_stacked_again(family, tmp_path):
    base = toys.write_base(tmp_path / "base", family=family)
    args = ModelArguments(**base)
    plan = plan_model(args, 512)
    model = build_model(plan, args, {"zero_optimization": {"stage": 0}}, torch.float32, 0, RANKS)
    image_options = ImageOptions(plan.images.size, plan.images.patch_size, plan.images.mean, "pad")
    export(model, plan, args, image_options, tmp_path / "hf")
    export(model, plan, args, image_options, tmp_path / "llava", form="llava")
    trunk, prefix = dict(model.language_model.base_model.named_parameters()), "model.language_model."
    for form, moved in (("hf", {}), ("llava", {"vision_tower": base["vision_tower"]})):
        loaded = load_model(tmp_path / form, moved=moved).model
        found = {n.removeprefix(prefix): p for n, p in loaded.named_parameters() if n.startswith(prefix)}
        assert found.keys() == trunk.keys() and any("experts" in name for name in found), form
        differing = [name for name, tensor in trunk.items() if not torch.equal(found[name][: len(tensor)], tensor)]
        assert differing == [], form


def test_what_is_not_there_and_what_is_not_needed_is_said(toy, tmp_path):
    tower = {"vision_tower": str(toy["vision_tower"])}
    (tmp_path / "bert").mkdir()
    (tmp_path / "bert" / "config.json").write_text(json.dumps({"model_type": "bert"}))
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / "trainer.json").write_text("{}")
    for path, moved, error, message in (
        (tmp_path / "nowhere", {}, ConfigError, r"--model_path .*nowhere: there is no such folder"),
        (tmp_path, {}, ConfigError, "contains no exported model"),
        (tmp_path / "bert", {}, ConfigError, "its model_type is 'bert', expected llava or"),
        (tmp_path / "torn", {}, DataError, "torn can't be used"),
        (toy["hf"], tower, ConfigError, "--vision_tower: .*hf is complete"),
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
            r"--model_path .*adapter is a LoRA adapter of .*give it by --model_b"
            if "lora" in EXTENSIONS
            else "reads folders with adapter_config.json",
        ),
    ):
        with pytest.raises(error, match=message), open_model(path, moved):
            pass


@pytest.mark.parametrize(
    ("ratio", "merge"),
    [("anyres", "spatial_unpad_nobase"), ("anyres", "spatial_maxpool2x2"), ("anyres_max_2", "spatial_unpad_maxpool2x2"),
     ("pad", "spatial_unpad"), ("anyres", "flat")],
)  # fmt: skip
def test_tiles_that_transformers_does_not_have_are_asked_by_trainings_own_code(tmp_path, ratio, merge):
    """The folder is in LLaVA's format, for no class of transformers' shows pictures so; the logits are the model's."""
    base = toys.write_base(tmp_path / "base")
    args = ModelArguments(**base, mm_patch_merge_type=merge)
    plan = plan_model(args, 512)
    model = build_model(plan, args, {"zero_optimization": {"stage": 0}}, torch.float32, 0, RANKS)
    spec = plan.images
    image_options = ImageOptions(
        spec.size, spec.patch_size, spec.mean, ratio, merge_type=merge, pool_mode="max", newline_position="frame"
    )
    export(model, plan, args, image_options, tmp_path / "llava", form="llava")
    loaded = load_model(tmp_path / "llava", moved={"vision_tower": str(base["vision_tower"])})
    shown = [
        media_layout("image", ((70, 30),), 1, loaded.image_options),
        media_layout("video", ((9, 9),) * 2, 1, loaded.image_options),
    ]
    samples = []
    for layout in shown:
        ids = torch.tensor([1, *[-200] * layout.num_tokens, 5])
        tiles = torch.randint(256, (layout.num_tiles, 3, spec.size, spec.size), dtype=torch.uint8)
        samples.append(LoadedSample(ids, ids.clamp(min=-100), [(tiles, layout)]))
    batch = collate(samples, loaded.image_options)
    pixels = (batch.pixel_values.float() / 255 - torch.tensor(spec.mean).view(1, 3, 1, 1)) / torch.tensor(
        spec.std
    ).view(1, 3, 1, 1)
    with torch.no_grad():
        torch.testing.assert_close(embed_batch(loaded.model, batch, pixels), model.embed(batch))
