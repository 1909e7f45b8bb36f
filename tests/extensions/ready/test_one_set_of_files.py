"""A ready model's export holds one set of processor files, from which transformers makes the images of training."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import toys
from daily import few
from PIL import Image
from ready_models import FAMILIES, QWEN_PROCESSORS, write_ready
from transformers import AutoImageProcessor, AutoProcessor, AutoTokenizer, GenerationConfig, ProcessorMixin

from llava_ds.config.arguments import Arguments, DataArguments, ModelArguments, TrainingArguments
from llava_ds.data.images.resize import cut_by
from llava_ds.data.jinja_templates import chat_template
from llava_ds.export.export_plan import ExportPlan
from llava_ds.export.output_folder import planned_entries, write_folder
from llava_ds.extensions.infer.load import load_model
from llava_ds.extensions.ready.ready_trial import _tiles_of
from llava_ds.files.processor_files import SETTINGS_FILES
from llava_ds.geometry import media_layout
from llava_ds.model.open.file_order import ignored_files_of_folder
from llava_ds.model.open.model_plan import plan_model

FIRST, WHOLE, VIDEO = SETTINGS_FILES
DAILY = ("smolvlm", "qwen2_5_vl", "gemma4_e")


def exported(folder: Path, out: Path, **flags: object) -> tuple[ExportPlan, Path]:
    """The export of a folder that a run with some flags would write, with holes in the place of weights."""
    model = ModelArguments(model_name_or_path=str(folder), version="processor")
    args = Arguments(model, DataArguments(), TrainingArguments(), frozenset(flags)).replaced(**flags)
    plan = plan_model(args.model, 512)
    export = ExportPlan(plan, args.model, plan.tower.image_options(args), torch.float32, 512)
    out.mkdir()
    write_folder(export, planned_entries(export), out, holes=True)
    return export, out


def disagree(folder: Path) -> str:
    """Let every file of a folder that may say the same say something else; return the template that is taken."""
    settings = json.loads((folder / FIRST).read_text())
    settings |= {"size": {"longest_edge": 40}, "image_mean": [0.1, 0.1, 0.1], "min_pixels": 7, "max_soft_tokens": 280}
    (folder / FIRST).write_text(json.dumps(settings))
    template = (folder / "chat_template.jinja").read_text()
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    (folder / "chat_template.jinja").write_text("{{ 'another' }}")
    tokenizer = json.loads((folder / "tokenizer_config.json").read_text())
    tokenizer["chat_template"] = [{"name": "default", "template": "{{ 'a third' }}"}, {"name": "rag", "template": "x"}]
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    return template


def check_files(export: ExportPlan, out: Path) -> None:
    """All files say the same, and are all that there is."""
    found = {name: json.loads((out / name).read_text()) for name in SETTINGS_FILES if (out / name).exists()}
    assert found[FIRST] == found[WHOLE]["image_processor"]
    assert "chat_template" not in found[WHOLE] and not (out / "chat_template.json").exists()
    if VIDEO in found and "video_processor" in found[WHOLE]:
        assert found[VIDEO] == found[WHOLE]["video_processor"]
    template = export.model.tokenizer.chat_template
    assert (out / "chat_template.jinja").read_text() == template
    assert ProcessorMixin.get_processor_dict(out, local_files_only=True)[0]["chat_template"] == template
    tokenizer = json.loads((out / "tokenizer_config.json").read_text()).get("chat_template")
    named = {one["name"]: one["template"] for one in tokenizer} if isinstance(tokenizer, list) else {}
    assert tokenizer is None or named.get("default", tokenizer) == template
    assert ignored_files_of_folder(out, "--flag", template=True) == []


def check_pixels(export: ExportPlan, out: Path) -> None:
    """transformers' image processor makes of an image what training did."""
    options, ready = export.image_options, export.model.architecture
    processor = AutoImageProcessor.from_pretrained(out, backend="pil", local_files_only=True, trust_remote_code=False)
    whole = {"crop_to_patches": True} if hasattr(processor, "crop_to_patches") else {}  # as InternVLProcessor does
    mean, std = (torch.tensor(each).view(1, 3, 1, 1) for each in (export.model.images.mean, export.model.images.std))
    for seed, size in enumerate([(300, 200), (31, 90), (64, 64), (200, 30), (20, 20)]):
        pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
        image = Image.fromarray(pixels)
        tiles = cut_by(image, options.tiling.cut(size), options.size, options.resample)
        layout = media_layout("image", (size,), 1, options)
        ours = ready.family.processed(ready.config, (tiles.float() / 255 - mean) / std, [layout])
        found = processor([image], return_tensors="pt", **whole)
        theirs = _tiles_of(found)
        assert ours.shape == theirs.shape and (ours - theirs).abs().max() < 1e-5
        if "image_grid_thw" in found:
            assert found["image_grid_thw"].prod().item() == len(ours)


@pytest.mark.parametrize("family", few(FAMILIES, DAILY))
def test_an_export_holds_one_set_whatever_the_folder_held(tmp_path, family):
    write_ready(tmp_path / "base", family)
    template = disagree(tmp_path / "base")
    assert "is not used" in ignored_files_of_folder(tmp_path / "base", "--flag", template=True)[0]
    export, out = exported(tmp_path / "base", tmp_path / "out")
    assert export.model.tokenizer.chat_template == template
    check_files(export, out)
    check_pixels(export, out)
    again = plan_model(ModelArguments(model_name_or_path=str(out), version="processor"), 512)
    assert again.tower.images == export.model.images and again.tower.tiles == export.model.tower.tiles
    if family in ("idefics3", "gemma3"):  # whose processors open without more packages
        assert AutoProcessor.from_pretrained(out, local_files_only=True).chat_template == template


@pytest.mark.parametrize("family", few(QWEN_PROCESSORS, ["qwen3_vl"]))
@pytest.mark.parametrize("published", [False, True])
def test_bounds_of_pixels_are_in_all_files(tmp_path, family, published):
    """Also where the folder has the older file alone, with the earlier names of bounds, as the first Qwen-VL have."""
    base = tmp_path / "base"
    write_ready(base, family)
    if published:
        (base / WHOLE).unlink()
        settings = json.loads((base / FIRST).read_text())
        size = settings.pop("size")
        settings |= {"min_pixels": size["shortest_edge"], "max_pixels": size["longest_edge"]}
        (base / FIRST).write_text(json.dumps(settings))
    export, out = exported(base, tmp_path / "out", min_pixels=2048, max_pixels=4096)
    assert (out / WHOLE).exists() != published
    if not published:
        check_files(export, out)
    check_pixels(export, out)


def test_files_that_say_the_same_stay_as_their_maker_wrote_them(tmp_path):
    base = tmp_path / "base"
    write_ready(base, "qwen3_vl")
    _, out = exported(base, tmp_path / "out")
    for name in (*SETTINGS_FILES, "chat_template.jinja", "tokenizer_config.json"):
        assert (out / name).read_bytes() == (base / name).read_bytes()
    assert not json.loads((base / WHOLE).read_text()).get("video_processor")


def test_a_folder_with_the_newer_file_alone_gets_the_older_one(tmp_path):
    """Which other programs read."""
    base = tmp_path / "base"
    write_ready(base, "gemma3")
    (base / FIRST).unlink()
    export, out = exported(base, tmp_path / "out")
    check_files(export, out)
    check_pixels(export, out)


@pytest.mark.parametrize("value_range", ["image", "-1024,3071", "0,1"])
def test_the_range_of_values_is_kept_for_inference_and_the_next_run(tmp_path, value_range):
    write_ready(tmp_path / "base", "smolvlm")
    export, out = exported(tmp_path / "base", tmp_path / "out", image_value_range=value_range)
    assert export.image_options.value_range == value_range
    check_files(export, out)
    check_pixels(export, out)
    assert load_model(out, "cpu").image_options.value_range == value_range
    again, further = exported(out, tmp_path / "again")
    assert again.image_options.value_range == value_range
    assert load_model(further, "cpu").image_options == load_model(out, "cpu").image_options
    other, _ = exported(out, tmp_path / "other", image_value_range="0,9")
    assert other.image_options.value_range == "0,9"


@pytest.mark.parametrize("where", ["tokenizer_config.json", "chat_template.jinja", "both"])
@pytest.mark.parametrize("merge", ["flat", "spatial_unpad"])
def test_a_language_models_own_template_is_not_that_of_the_export(tmp_path, where, merge):
    """A chat model under a LLaVA that was trained with --version v1: programs have to ask as training did."""
    base = toys.write_base(tmp_path / "base")
    folder = Path(base["model_name_or_path"])
    if where != "chat_template.jinja":
        config = json.loads((folder / "tokenizer_config.json").read_text())
        (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": "{{ 'own' }}"}))
    if where != "tokenizer_config.json":
        (folder / "chat_template.jinja").write_text("{{ 'own, too' }}")
    ratio = "square" if merge == "flat" else "anyres"
    model = ModelArguments(**base, mm_patch_merge_type=merge)
    args = Arguments(model, DataArguments(image_aspect_ratio=ratio), TrainingArguments(), frozenset())
    plan = plan_model(model, 512)
    export = ExportPlan(plan, model, plan.tower.image_options(args), torch.float32, 512)
    write_folder(export, planned_entries(export), tmp_path, holes=True)
    settings = json.loads((tmp_path / FIRST).read_text())
    assert settings == json.loads((tmp_path / WHOLE).read_text())["image_processor"]
    expected = chat_template("v1", plan.tokenizer)
    assert (tmp_path / "chat_template.jinja").read_text() == expected
    assert AutoTokenizer.from_pretrained(tmp_path).chat_template == expected
    assert AutoProcessor.from_pretrained(tmp_path, local_files_only=True).chat_template == expected
    assert "chat_template" not in json.loads((tmp_path / "tokenizer_config.json").read_text())


@pytest.mark.parametrize("given", [None, 7, [7, 8]], ids=["config", "one", "list"])
def test_transformers_stops_at_the_end_of_an_answer_that_was_learned(tmp_path, given):
    """Base models' files name the end of a text alone."""
    base = tmp_path / "base"
    write_ready(base, "qwen3_vl")
    file = base / "generation_config.json"
    file.write_text(json.dumps({"eos_token_id": given, "top_k": 9}))
    if given is None:
        file.unlink()
        config = json.loads((base / "config.json").read_text())
        config["text_config"]["eos_token_id"] = given = 7
        (base / "config.json").write_text(json.dumps(config))
    export, out = exported(base, tmp_path / "out")
    end = export.model.tokenizer.convert_tokens_to_ids("<|im_end|>")
    settings = GenerationConfig.from_pretrained(out)
    assert settings.eos_token_id == [*(given if isinstance(given, list) else [given]), end]
    assert settings.top_k == (9 if file.is_file() else None)
    file.write_text(json.dumps({"eos_token_id": [1, end]}))
    assert (exported(base, tmp_path / "again")[1] / file.name).read_text() == file.read_text()
