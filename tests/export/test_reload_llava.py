"""Exports in LLaVA's own format, projectors and adapters are read again at a run's end, whatever the projector: a
single bit that changed on the way is found."""

import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import llavas
import pytest
import torch
import toys
from exporting import RANKS, export, export_plan
from known_flags import known, needs
from safetensors import safe_open

from llava_ds.config.arguments import Arguments, DataArguments, ModelArguments, TrainingArguments
from llava_ds.constants import IGNORE_INDEX
from llava_ds.data.collate import LoadedSample
from llava_ds.engine.construct import build_model
from llava_ds.engine.runner import Direct
from llava_ds.export import final_export
from llava_ds.export.bit_check import check_written, sums_of
from llava_ds.extensions.infer.load import load_model
from llava_ds.geometry import media_layout
from llava_ds.model.open.folder import take_from_model
from llava_ds.model.open.model_plan import plan_model

KINDS = [
    "linear", "mlp1x_gelu", "mlp2x_gelu", "mlp3x_gelu", "mlp2x_res2x_gelu", "pooler", "mlp2x_gelu_ps2",
    "mlp2x_gelu_avg3", "mlp1x_res1x_gelu_avg2",
]  # fmt: skip


ADAPTERS = []  # what writes them
if known(["lora_enable"]):
    from llava_ds.extensions.lora import adapter_export

    ADAPTERS.append((adapter_export, "export_adapter"))


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> dict[str, str]:
    return toys.write_base(tmp_path_factory.mktemp("base"), clip={"image_size": 48})


@pytest.fixture
def ended(base, tmp_path, monkeypatch, capsys):
    """A function that ends a run with a model of some form and flags, and returns what it printed; change: done to the
    folder before it is read again."""
    for name in ("write_card", "read_run_record", "write_trainer_state"):
        monkeypatch.setattr(final_export, name, lambda *_: (None, None))

    def end(form: str, change=lambda folder: None, **flags: object) -> str:
        args = Arguments(ModelArguments(**base), DataArguments(), TrainingArguments(), frozenset())
        args = args.replaced(output_dir=str(tmp_path / "out"), **flags)
        model_args = args.model
        plan = plan_model(model_args, 512)
        model = build_model(plan, model_args, {"zero_optimization": {"stage": 0}}, torch.float32, 0, RANKS)
        options = plan.tower.image_options(args)
        size = (options.size, options.size)
        layout = media_layout("image", (size,), 1, options)
        pixels = torch.randint(0, 256, (layout.num_tiles, 3, *size), dtype=torch.uint8)
        ids = torch.tensor([1, *[-200] * layout.num_tokens, *range(10, 40)])
        sample = LoadedSample(ids, torch.full_like(ids, IGNORE_INDEX), [(pixels, layout)])
        dataset = SimpleNamespace(example=lambda: sample, image_options=options)
        engine = SimpleNamespace(module=model, eval=model.eval, empty_partition_cache=lambda: None)
        planned = export_plan(model, plan, model_args, options, form=form)
        for module, name in ((final_export, "write_live_folder"), *ADAPTERS):
            write = getattr(module, name)

            def written(*arguments, write=write):
                found = write(*arguments)
                change(tmp_path / "out")
                return found

            monkeypatch.setattr(module, name, written)
        (tmp_path / "out").mkdir(exist_ok=True)
        try:
            final_export.export_model(Direct(engine), planned, args, dataset, RANKS)
        finally:
            monkeypatch.undo()
            for name in ("write_card", "read_run_record", "write_trainer_state"):
                monkeypatch.setattr(final_export, name, lambda *_: (None, None))
        return capsys.readouterr().out

    return end


def flip(name: str, part: str, folder: Path) -> None:
    """Flip the lowest bit of the last number of a tensor in a file of the folder: too little for any logit."""
    file = folder / name
    content = bytearray(file.read_bytes())
    if name.endswith(".safetensors"):
        header = int.from_bytes(content[:8], "little")
        found = json.loads(content[8 : 8 + header])
        tensor = next(each for key, each in found.items() if part in key)
        content[8 + header + tensor["data_offsets"][1] - 4] ^= 1
    else:
        tensors = torch.load(file)
        number = next(each for key, each in tensors.items() if part in key).flatten()[-4:].numpy().tobytes()
        assert content.count(number) == 1
        content[content.index(number) + len(number) - 4] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("kind", KINDS)
def test_a_projector_is_read_again(ended, kind):
    said = ended("projector", mm_projector_type=kind)
    assert "(read again: every name, shape and bit equals the model's)" in said
    for name in ("mm_projector.bin", "mm_projector.safetensors"):
        with pytest.raises(
            RuntimeError, match=rf"{name} was exported, but model.mm_projector\..* in it does not have the bits"
        ):
            ended("projector", partial(flip, name, "mm_projector"), mm_projector_type=kind)


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_in_llavas_format_is_opened_again(ended, kind):
    said = ended("llava", mm_projector_type=kind)
    assert "(in LLaVA's format, reloaded with llava_ds, logits differ by 0.0e+00 of the largest)" in said
    with pytest.raises(
        RuntimeError, match=r"out was exported, but model\.mm_projector\..* does not have the bits that were written"
    ):
        ended("llava", partial(flip, "model.safetensors", "mm_projector"), mm_projector_type=kind)


@pytest.mark.parametrize("eyes", ["two towers", "squares of two sizes", "images in their shape", "whole anyres"])
def test_images_of_every_kind_are_computed_again(ended, base, tmp_path, eyes):
    flags: dict[str, object] = {"mm_projector_type": "mlp2x_gelu"}
    if eyes == "two towers":
        other = toys.write_tower(tmp_path / "other", "clip", image_size=48)["vision_tower"]
        flags["vision_tower"] = f"{base['vision_tower']},{other}"
    elif eyes == "squares of two sizes":
        flags |= {"s2": True, "s2_scales": "48,96"}
    elif eyes == "images in their shape":
        flags |= {**toys.write_tower(tmp_path / "naflex", "siglip2"), "mm_native_resolution": True}
    else:
        flags |= {"mm_patch_merge_type": "spatial", "image_aspect_ratio": "anyres"}
    assert "reloaded with llava_ds, logits differ by 0.0e+00" in ended("llava", **flags)
    with pytest.raises(RuntimeError, match="does not have the bits that were written"):
        ended("llava", partial(flip, "model.safetensors", "mm_projector"), **flags)


@pytest.mark.parametrize("part", ["embed_tokens", "vision_tower", "mlp.down_proj"])
def test_every_part_of_it_is_compared(ended, part):
    with pytest.raises(RuntimeError, match=rf"{part}.* does not have the bits that were written"):
        ended("llava", partial(flip, "model.safetensors", part))


@needs("lora_enable")
@pytest.mark.parametrize("kind", ["linear", "mlp2x_res2x_gelu", "mlp2x_gelu_avg3"])
def test_an_adapters_projector_is_read_again(ended, kind):
    flags = {"lora_enable": True, "lora_r": 4, "mm_projector_type": kind}
    said = ended("adapter", **flags)
    assert "(reloaded with peft, logits differ by " in said
    with pytest.raises(RuntimeError, match=r"non_lora_trainables.bin was exported, but .*mm_projector"):
        ended("adapter", partial(flip, "non_lora_trainables.bin", "mm_projector"), **flags)
    with pytest.raises(RuntimeError, match=r"adapter_model.safetensors was exported, but .*lora_A"):
        ended("adapter", partial(flip, "adapter_model.safetensors", "lora_A"), **flags)


def test_a_projector_that_is_written_wrong_beside_an_adapter_is_found_by_the_logits(ended, monkeypatch):
    """It is read from the file, and not taken from the trained model."""
    adapter = pytest.importorskip("llava_ds.extensions.lora.adapter_export")
    before = adapter._before
    monkeypatch.setattr(adapter, "_before", lambda name, *rest: before(name, *rest) * (2 if "projector" in name else 1))
    with pytest.raises(RuntimeError, match="peft computes different logits from it"):
        ended("adapter", lora_enable=True, lora_r=4)


@pytest.mark.parametrize("form", ["llava", "hf"])
@pytest.mark.parametrize("value_range", [None, "image", "-1024,3071"])
def test_the_range_of_values_is_kept_for_inference_and_the_next_run(base, tmp_path, form, value_range):
    flags = {**base, "mm_projector_type": "mlp2x_gelu", "image_value_range": value_range}
    args = Arguments(ModelArguments(**base), DataArguments(), TrainingArguments(), frozenset()).replaced(**flags)
    plan = plan_model(args.model, 512)
    model = build_model(plan, args.model, {"zero_optimization": {"stage": 0}}, torch.float32, 0, RANKS)
    export(model, plan, args.model, plan.tower.image_options(args), tmp_path / "out", form)
    given = {"model_name_or_path": str(tmp_path / "out")}
    given |= {"vision_tower": base["vision_tower"]} if form == "llava" else {}
    taken, _ = take_from_model(llavas.arguments(given))
    assert taken.data.image_value_range == value_range
    moved = {"vision_tower": base["vision_tower"]} if form == "llava" else None
    assert load_model(tmp_path / "out", "cpu", moved=moved).image_options.value_range == value_range


def test_a_setting_that_got_lost_is_found_by_the_logits(ended):
    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "rope_theta": 7.0, "rope_parameters": None}))

    with pytest.raises(RuntimeError, match="llava_ds computes different logits from it"):
        ended("llava", change)


def test_a_newline_is_part_of_both(ended):
    flags = {"mm_patch_merge_type": "spatial_unpad", "image_aspect_ratio": "anyres"}
    assert "read again" in ended("projector", **flags)
    with pytest.raises(RuntimeError, match="image_newline"):
        ended("projector", partial(flip, "mm_projector.bin", "image_newline"), **flags)
    with pytest.raises(RuntimeError, match="image_newline"):
        ended("llava", partial(flip, "model.safetensors", "image_newline"), **flags)


def test_off_reads_nothing_again(ended):
    change = partial(flip, "mm_projector.bin", "mm_projector")
    assert "(not read again: --check_export off)" in ended("projector", change, check_export="off")
    change = partial(flip, "model.safetensors", "mm_projector")
    assert "(in LLaVA's format, not reloaded: --check_export off)" in ended("llava", change, check_export="off")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(), (1,), (3,), (5, 7), (8, 8)])
def test_a_sum_changes_with_any_bit(dtype, shape, tmp_path):
    tensor = torch.randn(shape).to(dtype)
    before = sums_of([("a", tensor)])
    for place in {0, tensor.nbytes // 2, tensor.nbytes - 1}:
        for bit in (1, 128):
            changed = tensor.clone().reshape(-1)
            changed.view(torch.uint8)[place] ^= bit
            assert sums_of([("a", changed.reshape(shape))]) != before


def test_tensors_that_are_missing_are_found(tmp_path):
    from safetensors.torch import save_file

    save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors")
    sums = sums_of({"a": torch.ones(2), "b": torch.ones(1)}.items())
    with pytest.raises(RuntimeError, match=r"holds 1 tensors, but 2 were written: report this"):
        check_written({tmp_path: sums})
    with safe_open(tmp_path / "model.safetensors", "pt") as opened:
        assert list(opened.keys()) == ["a"]
