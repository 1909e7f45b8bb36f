"""Two ranks at ZeRO-3 start from every kind of model alike, and neither ever holds a whole one beside its share."""

import json
from pathlib import Path

import llavas
import pytest
import torch
import toys
from launching import ROOT, ds_config, launch, losses, run_many, toy_run
from safetensors.torch import load_file

MEASURE = ROOT / "tests" / "workers" / "loading_memory.py"
SHARDS = 4
LARGE = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 6, "vocab_size": 6000}


@pytest.fixture(scope="module")
def measured(tmp_path_factory) -> tuple[int, dict[str, list[dict[str, int]]]]:
    """(bytes of the model, what each rank measured by the kind of its files)."""
    folder = tmp_path_factory.mktemp("memory")
    base = toys.write_base(folder / "base", **LARGE)
    model = llavas.hf_model(base)
    cases = {
        "first": toys.write_base(folder / "small"),
        "safetensors": llavas.write_llava(folder / "safetensors", base, model, shards=SHARDS),
        "bin": llavas.write_llava(folder / "bin", base, model, suffix=".bin", shards=SHARDS),
        "rows": {**llavas.write_llava(folder / "rows", base, model, shards=SHARDS), "mm_use_im_start_end": True},
    }
    size = sum(file.stat().st_size for file in Path(cases["safetensors"]["model_name_or_path"]).glob("*.safetensors"))
    cases["zero-2"] = cases["safetensors"]
    del model
    listed = folder / "cases.json"
    listed.write_text(json.dumps({"cases": cases, "out": str(folder), "stages": {"zero-2": 2}}))
    done = launch(2, MEASURE, str(listed))
    assert done.returncode == 0, done.stdout + done.stderr
    return size, {name: [json.loads((folder / f"{name}-{rank}.json").read_text()) for rank in (0, 1)] for name in cases}


@pytest.mark.long
@pytest.mark.parametrize("kind", ["safetensors", "bin", "rows"])
def test_no_rank_holds_more_than_a_shard_beside_its_share(measured, kind):
    size, ranks = measured[0], measured[1][kind]
    assert size > 300e6
    for found in ranks:
        assert 0.4 * size < found["share"] < 0.51 * size  # of all rows, or of those that the tokenizer has
        assert found["left"] < found["share"] + 0.1 * size, found
        assert found["anonymous"] < found["share"] + size / SHARDS, found
        assert found["resident"] < found["share"] + size / SHARDS + 0.1 * size, found


@pytest.mark.long
def test_below_zero_3_no_rank_holds_a_second_copy_on_the_host(measured):
    size, ranks = measured[0], measured[1]["zero-2"]
    for found in ranks:
        assert 0.9 * size < found["share"] < 1.1 * size  # on the CPU the model itself lies there
        assert found["anonymous"] < found["share"] + 0.1 * size, found


COMMON = {"max_steps": 2, "image_aspect_ratio": "square"}


@pytest.fixture(scope="module")
def starts(tmp_path_factory) -> dict[str, Path]:
    """The output of two ranks at ZeRO-3 after two steps, by the model that they started from."""
    folder = tmp_path_factory.mktemp("starts")
    base = toys.write_base(folder / "base")
    model = llavas.hf_model(base)
    data = toys.write_data(folder / "data", "itiititi")
    projector = {
        name: tensor for name, tensor in llavas.llava_names(llavas.tensors_of(model)).items() if "mm_projector" in name
    }
    torch.save(projector, folder / "mm_projector.bin")
    starts = {
        "language model": {**base, "pretrain_mm_mlp_adapter": folder / "mm_projector.bin"},
        "llava": llavas.write_llava(folder / "llava", base, model, shards=2),
        "llava, pickles": llavas.write_llava(folder / "pickles", base, model, suffix=".bin", shards=3),
        "hf": llavas.write_hf(folder / "hf", base, model),
        "hf, version 4": llavas.write_hf(folder / "old", base, model, old=True),
        "adapter": llavas.write_idle_adapter(folder / "adapter", base, projector),
    }
    outputs = {name: folder / f"run-{i}" for i, name in enumerate(starts)}
    todo = [
        toy_run({**data, **given}, outputs[name], ds_config(3), tune_mm_mlp_adapter=True, **COMMON)
        for name, given in starts.items()
    ]
    run_many(2, folder / "launch", todo)
    return outputs


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, Path]:
    """Both stages with tokens around images, and a whole model from transformers' folder, on two ranks at ZeRO-3."""
    folder = tmp_path_factory.mktemp("stages")
    base = toys.write_base(folder / "base")
    data = toys.write_data(folder / "data", "itiititi")
    outputs = {}
    # Tokens around images: stage 1 trains their rows, stage 2 takes them from the projector's file.
    marked = {**data, **base, "mm_use_im_start_end": True}
    outputs["marks"], outputs["marks, stage 2"] = folder / "marks", folder / "marks-2"
    todo = [toy_run(marked, outputs["marks"], ds_config(3), tune_mm_mlp_adapter=True, **COMMON)]
    brought = {"pretrain_mm_mlp_adapter": outputs["marks"] / "mm_projector.bin"}
    # A whole model from transformers' folder, which is exported to one again, and compared with it.
    outputs["whole"] = folder / "whole"
    hf = llavas.write_hf(folder / "hf", base, llavas.hf_model(base))
    todo.append(toy_run({**data, **hf}, outputs["whole"], ds_config(3), max_steps=1))
    todo.append(toy_run(marked, outputs["marks, stage 2"], ds_config(3), **brought, **{**COMMON, "learning_rate": 0}))
    run_many(2, folder / "launch", todo)
    return outputs


@pytest.mark.long
def test_every_kind_of_model_trains_alike(starts):
    curves = {name: losses(output) for name, output in starts.items()}
    assert len(curves) == 6 and all(len(curve) == 2 for curve in curves.values())
    assert all(curve == curves["language model"] for curve in curves.values()), curves


@pytest.mark.long
def test_rows_of_new_tokens_go_from_stage_to_stage(runs):
    folder = runs["marks"].parent
    before = load_file(folder / "base/llama/model.safetensors")["model.embed_tokens.weight"]
    saved = torch.load(runs["marks"] / "mm_projector.bin", weights_only=True)
    learned = saved["model.embed_tokens.weight"]
    assert len(saved) == 5 and len(learned) == len(before) + 2
    assert not torch.allclose(learned[-2], before.mean(0)) and not torch.equal(learned[-2], learned[-1])
    exported = load_file(runs["marks, stage 2"] / "model.safetensors")["language_model.model.embed_tokens.weight"]
    assert torch.equal(exported[: len(before)], before)  # at a rate of 0; LLaVA takes the new rows alone
    assert torch.equal(exported[len(before) : len(before) + 2], learned[-2:])
