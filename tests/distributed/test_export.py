"""A run's export equals the export of its last checkpoint, bit for bit, at every stage."""

import itertools
import json
import shutil

import pytest
import torch
import toys
from extension_there import AXES
from launching import ds_config, run_many, run_script, tight_config, toy_run
from safetensors.torch import load_file

from llava_ds.constants import ConfigError, DataError

# tests/export has what one process can show of it, tests/distributed/test_whole_run.py what a run leaves.
pytestmark = pytest.mark.long

RUNS = {
    # name: (stage, flags)
    "zero0": (0, {}),
    "zero3": (3, {}),
    "zero3 bf16 tied": (3, {"bf16": True, "unfreeze_mm_vision_tower": True, "max_shard_size": "20KB"}),
    "zero2 linear": (2, {"mm_projector_type": "linear", "bf16": True}),
}
MORE_RUNS = {
    f"zero{stage} {dtype}": (stage, {"bf16": dtype == "bf16"}) for stage in (0, 1, 2, 3) for dtype in ("fp32", "bf16")
}


def given(folder, name: str) -> dict[str, str]:
    base = (
        toys.write_base(folder / "tied", tie_word_embeddings=True)
        if "tied" in name
        else toys.write_base(folder / "base")
    )
    return {**base, **toys.write_data(folder / "data", "iittitii")}


def trained(folder, runs: dict, num_ranks: int) -> tuple[dict, str]:
    """Output folders by name, and what was printed."""
    out = {name: folder / name.replace(" ", "-") for name in runs}
    flags = [
        toy_run(
            given(folder, name),
            out[name],
            config,
            **{"max_steps": 2, "verbose": True, **more, "save_strategy": "steps"},
        )
        for name, (stage, more) in runs.items()
        for config in [tight_config(folder) if stage == 3 else ds_config(stage)]
    ]
    return out, run_many(num_ranks, folder, flags)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("export"), RUNS, 2)


def tensors(folder) -> dict[str, torch.Tensor]:
    return {name: t for file in sorted(folder.glob("model*.safetensors")) for name, t in load_file(file).items()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) and a[name].dtype == b[name].dtype for name in a)


def close(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    """True if all but one in a thousand numbers differ by less than 1e-6, a small part of a step of Adam."""
    differences = torch.cat([(a[name] - b[name]).abs().flatten() for name in a])
    return a.keys() == b.keys() and (differences > 1e-6).double().mean().item() < 1e-3


def check_against_live(out, folder) -> None:
    for name, run in out.items():
        run_script("export.py", run / "checkpoint-2", "--output_dir", folder / name)
        assert same(tensors(run), tensors(folder / name)), name
        for file in ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json", "README.md"):
            written, again = ((at / file).read_text() for at in (run, folder / name))
            assert written.replace(run.name, "NAME") == again.replace((folder / name).name, "NAME"), (name, file)


def test_a_checkpoint_gives_what_the_run_left(runs, tmp_path):
    check_against_live(runs[0], tmp_path)


def test_two_ranks_of_zero_3_leave_the_model_of_zero_0(runs):
    out, printed = runs
    assert same(tensors(out["zero0"]), tensors(out["zero3"]))
    assert len(list(out["zero3 bf16 tied"].glob("model-*.safetensors"))) > 3
    assert printed.count("transformers opens its names and shapes") == 3
    assert printed.count("reloaded with transformers, logits differ by") == 3
    assert not list(out["zero0"].glob("export-trial-*"))


def test_what_transformers_has_no_class_for_is_in_llavas_format(runs):
    out, printed = runs
    assert "written in LLaVA's own format, because transformers has no class with --mm_projector_type linear" in printed
    names = tensors(out["zero2 linear"])
    assert {"model.mm_projector.weight", "lm_head.weight", "model.norm.weight"} <= names.keys()
    assert "model.vision_tower.vision_tower.vision_model.encoder.layers.2.mlp.fc1.weight" in names  # never built
    config = json.loads((out["zero2 linear"] / "config.json").read_text())
    assert (config["model_type"], config["torch_dtype"]) == ("llava_llama", "bfloat16")
    with pytest.raises(ConfigError, match="--format hf is not possible: transformers has no class"):
        run_script("export.py", out["zero2 linear"] / "checkpoint-2", "--format", "hf")


def test_the_run_says_what_it_left(runs):
    folder = runs[0]["zero3"]
    card = (folder / "README.md").read_text()
    assert "llama with the vision tower clip, trained with llava_ds on data.json" in card
    assert "- optimizer steps: 2 of 2" in card and 'LlavaForConditionalGeneration.from_pretrained("zero3", ' in card
    assert str(folder.parent) not in card
    state = json.loads((folder / "trainer_state.json").read_text())
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    assert state["global_step"] == 2 and [row["loss"] for row in state["log_history"]] == [row["loss"] for row in rows]


def test_precision_shards_and_a_projector_by_itself(runs, tmp_path):
    checkpoint = runs[0]["zero3"] / "checkpoint-2"
    run_script(
        "export.py", checkpoint, "--dtype", "bfloat16", "--max_shard_size", "40KB", "--output_dir", tmp_path / "half"
    )
    whole, half = tensors(runs[0]["zero3"]), tensors(tmp_path / "half")
    assert len(list((tmp_path / "half").glob("*.safetensors"))) > 2
    assert same({name: tensor.bfloat16() for name, tensor in whole.items()}, half)
    run_script("export.py", checkpoint, "--format", "projector", "--output_dir", tmp_path / "projector")
    projector = torch.load(tmp_path / "projector" / "mm_projector.bin")
    assert torch.equal(projector["model.mm_projector.0.weight"], whole["multi_modal_projector.linear_1.weight"])
    with pytest.raises(ConfigError, match="is not empty: name another folder, or give --overwrite"):
        run_script("export.py", checkpoint, "--output_dir", tmp_path / "half")
    run_script("export.py", checkpoint, "--output_dir", tmp_path / "half", "--overwrite")
    assert same(whole, tensors(tmp_path / "half"))


def test_damaged_checkpoints_and_other_base_models_are_refused(runs, tmp_path):
    run = runs[0]["zero3"]
    shutil.copytree(run, tmp_path / "run")
    checkpoint = tmp_path / "run" / "checkpoint-2"
    other = toys.write_base(tmp_path / "other", hidden_size=64)["model_name_or_path"]
    with pytest.raises(ConfigError, match="is not the model that training started from"):
        run_script("export.py", checkpoint, "--model_name_or_path", other)
    with pytest.raises(ConfigError, match="not found: give its new path"):
        run_script("export.py", checkpoint, "--vision_tower", tmp_path / "nowhere")
    (tmp_path / "run" / "run" / "run.json").rename(tmp_path / "run" / "gone.json")
    with pytest.raises(DataError, match=r"run\.json can't be read"):
        run_script("export.py", checkpoint)
    next(checkpoint.glob("engine/*optim_states.pt")).unlink()
    with pytest.raises(DataError, match=r"optim_states\.pt is missing"):
        run_script("export.py", checkpoint)
    with pytest.raises(ConfigError, match="the folder does not exist"):
        run_script("export.py", tmp_path / "nothing")


@pytest.mark.parametrize(("num_ranks", "flag"), [(1, None), (2, None), *itertools.product((2, 4), AXES)])
def test_every_stage_and_precision(num_ranks, flag, tmp_path):
    axes = {} if flag is None else {flag: 2}
    stages = range(2) if "pipeline_parallel_size" in axes else range(4)
    runs = {name: (stage, flags | axes) for name, (stage, flags) in MORE_RUNS.items() if stage in stages}
    out, _ = trained(tmp_path / "runs", runs, num_ranks)
    check_against_live(out, tmp_path)
    for stage in stages[1:]:
        weights, others = tensors(out["zero0 fp32"]), tensors(out[f"zero{stage} fp32"])
        # More than two ranks sum gradients in an order that depends on how they are laid out.
        assert same(weights, others) if num_ranks <= 2 else close(weights, others)
