"""Upcycled models through the real launcher: at every stage, over ranks that share the experts or not, and resumed."""

import json
import math
from pathlib import Path

import pytest
import torch
import toys
from checkpoints import break_off, differences
from extension_there import if_there
from launching import ROOT, command_line, ds_config, launch, losses, run_many, run_script, toy_run
from safetensors.torch import load_file, save_file

from llava_ds.files.jsonl import read_metrics

STEPS, SAVED = 5, 3
MOE = {"moe_enable": True, "moe_mode": "dense", "num_experts": 4, "top_k_experts": 2, "router_aux_loss_coef": 0.01}
EP = {**MOE, "ep_size": 2}
# Ranks have packs of unequal lengths, so that each by itself would have another capacity.
FEW, ENOUGH = ({"capacity_factor": factor, "tokens_per_micro_batch": 120} for factor in (0.6, 8.0))
# Adam makes a full step of a gradient that is rounding alone: a larger epsilon keeps it as small as it is.
RATES = {"learning_rate": 2e-3, "adam_epsilon": 1e-3, "max_grad_norm": 1.0, "max_steps": STEPS}
# Name: ranks, stage, flags.
QUICK = {
    "dense": (2, 0, {}),
    "ep1-2": (2, 2, MOE),
    "ep2-2": (2, 2, EP),
    "packed-ep1": (2, 2, {**MOE, "tokens_per_micro_batch": 120}),
    "enough-ep2": (2, 2, {**EP, **ENOUGH}),
    "few-ep1": (2, 2, {**MOE, **FEW}),
    "few-ep2": (2, 2, {**EP, **FEW}),
}
FULL = {
    **QUICK,
    "ep2-0": (2, 0, EP),
    "ep1-0": (2, 0, MOE),
    "ep1-1": (2, 1, MOE),
    "ep2-1": (2, 1, EP),
    "recomputed": (2, 2, {**EP, "gradient_checkpointing": True}),
    **{f"bf16-{stage}": (2, stage, {**EP, "bf16": True}) for stage in range(3)},
    **{
        f"few-{kind}-ep{ep}": (2, stage, {**MOE, **FEW, "ep_size": ep, **more})
        for kind, stage, more in (
            ("top1", 0, {"top_k_experts": 1, "min_capacity": 4}),
            ("top3", 1, {"top_k_experts": 3, "use_residual": True, "gradient_checkpointing": True}),
        )
        for ep in (1, 2)
    },
}
OTHERS = ("dense", "packed-ep1", "enough-ep2")  # than those whose loss is that of ep1-0
SAME = [name for name in FULL if name not in OTHERS and not name.startswith(("bf16", "few"))]
# Name of the run that was saved, and of the one that goes on from it.
MOVES = [
    *((name, name) for name in FULL if name != "dense"),
    ("ep2-0", "ep1-2"), ("ep2-2", "ep1-0"), ("ep2-1", "alone"), ("ep1-2", "ep2-0"), ("ep1-0", "ep2-1"),
    ("alone", "ep2-2"), ("ep2-0", "ep2-2"), ("ep2-2", "ep2-0"), ("ep2-2", "four"), ("four", "ep2-1"), ("four", "ep1-0"),
]  # fmt: skip
MORE = {"alone": (1, 1, MOE), "four": (4, 2, EP)}


def a_run(given: dict[str, str], out: Path, stage: int, more: dict) -> dict[str, object]:
    saving = {
        "save_strategy": "steps",
        "save_steps": SAVED,
        **if_there("replicas", check_divergence_steps=1),
        **if_there("samples", sample_steps=STEPS),
        "export_format": "llava",
    }
    return toy_run(given, out, ds_config(stage), **{**RATES, **saving, **more})


def toy(folder: Path) -> dict[str, str]:
    return toys.write_base(folder / "base") | toys.write_data(folder / "data", "itii" * 5)


@pytest.fixture(scope="module")
def quick(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("upcycled")
    given = toy(folder)
    runs = [a_run(given, folder / name, stage, more) for name, (_, stage, more) in QUICK.items()]
    runs.append(a_run(given, folder / "mixtral", 1, {**EP, "export_format": "hf"}))
    (folder / "output.txt").write_text(run_many(2, folder, runs))
    return folder


@pytest.fixture(scope="module")
def full(tmp_path_factory) -> Path:
    """Whole runs by name, and runs that went on by "FROM to TO"."""
    folder = tmp_path_factory.mktemp("upcycled-full")
    given, kinds = toy(folder), FULL | MORE
    groups = sorted({(ranks, more.get("ep_size", 1)) for ranks, _, more in kinds.values()})

    def of_group(names: list[str], group: tuple[int, int]) -> list[str]:
        return [name for name in names if (kinds[name][0], kinds[name][2].get("ep_size", 1)) == group]

    for group in groups:
        runs = [a_run(given, folder / name, *kinds[name][1:]) for name in of_group(list(kinds), group)]
        run_many(group[0], folder / f"whole-{group}", runs)
    for group in groups:
        moved = []
        for before, after in MOVES:
            if of_group([after], group):
                break_off(folder / before, folder / f"{before} to {after}", SAVED)
                _, stage, more = kinds[after]
                if {before, after} & MORE.keys():  # on another number of ranks, which the routers' loss depends on
                    more = {**more, "allow_changed_flags": "world_size,per_device_train_batch_size"}
                moved.append(a_run(given, folder / f"{before} to {after}", stage, more))
        said = run_many(group[0], folder / f"moved-{group}", moved)
        assert said.count(f"resumed at step {SAVED}") == len(moved)
    return folder


def check_same(one: Path, other: Path, tolerance: float = 1e-5) -> None:
    first, second = (read_metrics(path / "run" / "metrics.jsonl") for path in (one, other))
    assert len(first) == len(second) == STEPS
    for a, b in zip(first, second):
        for name in ("loss", "grad_norm", "experts/aux_loss"):
            assert a[name] == pytest.approx(b[name], rel=tolerance, abs=tolerance), (name, a["step"])
    expected, found = (load_file(path / "model.safetensors") for path in (one, other))
    assert expected.keys() == found.keys()
    for key, weight in expected.items():
        assert (weight - found[key]).abs().max() <= 2 * tolerance, key


def test_the_upcycled_model_begins_as_the_dense_one(quick):
    assert losses(quick / "ep2-2")[0] == pytest.approx(losses(quick / "dense")[0], abs=1e-6)
    assert losses(quick / "ep2-2")[-1] != pytest.approx(losses(quick / "dense")[-1], abs=1e-3)


def test_shared_experts_train_as_whole_ones(quick):
    check_same(quick / "ep1-2", quick / "ep2-2")


def test_experts_with_room_for_every_token_train_as_those_that_drop_none(quick):
    check_same(quick / "packed-ep1", quick / "enough-ep2")


def test_ranks_that_share_experts_drop_the_same_tokens_as_ranks_with_whole_ones(quick):
    check_same(quick / "few-ep1", quick / "few-ep2")
    assert losses(quick / "few-ep1")[0] > losses(quick / "packed-ep1")[0] + 0.05
    assert (quick / "output.txt").read_text().count("drops the rest, so the result depends") == 3


@pytest.mark.long
@pytest.mark.parametrize("kind", ["top1", "top3"])
def test_any_number_of_experts_for_a_token_drops_the_same(full, kind):
    check_same(full / f"few-{kind}-ep1", full / f"few-{kind}-ep2")


def test_the_load_is_logged_and_its_loss_trains_the_routers(quick):
    for row in read_metrics(quick / "ep2-2" / "run" / "metrics.jsonl"):
        assert 1 <= row["experts/max_over_mean"] <= 4 and 0 < row["experts/entropy"] <= 1
        assert 2 <= row["experts/aux_loss"] < 4  # one for each of two layers where the load is even


def test_a_checkpoint_and_the_export_hold_every_expert(quick):
    exported = load_file(quick / "ep2-2" / "model.safetensors")
    block = "model.layers.1.mlp.deepspeed_moe.experts.deepspeed_experts"
    weights = [exported[f"{block}.{expert}.down_proj.weight"] for expert in range(4)]
    assert not any(torch.equal(one, other) for i, one in enumerate(weights) for other in weights[:i])
    layouts = [json.loads((quick / "ep2-2" / f"checkpoint-5/layout-{rank}.json").read_text()) for rank in range(2)]
    held = [{piece[0] for slot in layout["slots"] for piece in slot if "_experts." in piece[0]} for layout in layouts]
    assert not held[0] & held[1] and len(held[0] | held[1]) == 2 * 4 * 3


def test_a_checkpoint_exports_the_same_model(quick):
    check_export(quick, "ep2-2")


@pytest.mark.long
def test_a_checkpoint_of_stage_0_exports_the_same_model(full):
    check_export(full, "ep2-0")


def check_export(folder: Path, name: str) -> None:
    run_script("export.py", folder / name / f"checkpoint-{STEPS}", "--output_dir", folder / f"again-{name}")
    expected, found = (load_file(folder / each / "model.safetensors") for each in (name, f"again-{name}"))
    shared = expected.keys() & found.keys()
    experts = [key for key in expected if "deepspeed_experts" in key]
    assert len(experts) == 2 * 4 * 3 and set(experts) <= shared
    assert all(torch.equal(expected[key], found[key]) for key in shared)


def test_transformers_computes_the_same_as_a_mixtral(quick):
    """Which the export itself has compared, on the trained experts of both ranks."""
    assert (quick / "output.txt").read_text().count(
        f"model: {quick / 'mixtral'} (reloaded with transformers, logits"
    ) == 1
    assert losses(quick / "mixtral") == pytest.approx(losses(quick / "ep2-2"), abs=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("name", SAME)
def test_every_stage_and_layout_of_experts_trains_the_same_model(full, name):
    check_same(full / "ep1-0", full / name)


@pytest.mark.long
@pytest.mark.parametrize("name", MORE)
def test_any_number_of_ranks_trains_nearly_the_same(full, name):
    """The routers' loss is of micro-batches, which other ranks have others of."""
    assert losses(full / name) == pytest.approx(losses(full / "ep1-0"), abs=1e-3)


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in FULL if name != "dense"])
def test_on_the_same_ranks_it_resumes_bit_for_bit(full, name):
    whole, resumed = full / name, full / f"{name} to {name}"
    assert losses(whole) == losses(resumed) and len(losses(whole)) == STEPS
    assert differences(whole / f"checkpoint-{STEPS}", resumed / f"checkpoint-{STEPS}") == []


@pytest.mark.long
@pytest.mark.parametrize(("before", "after"), [pair for pair in MOVES if pair[0] != pair[1]])
def test_on_other_ranks_it_goes_on_as_before(full, before, after):
    moved = full / f"{before} to {after}"
    if {before, after} & MORE.keys():  # whose micro-batches are others
        assert losses(moved) == pytest.approx(losses(full / before), abs=1e-3)
    else:
        check_same(full / before, moved)


@pytest.mark.long
def test_experts_that_get_no_token_hang_nobody(full):
    """Routers of zeros send every token to the first two experts, which are all on the first rank."""
    folder = full / "idle"
    folder.mkdir()
    for file in (full / "ep2-2").iterdir():
        if file.is_file():
            (folder / file.name).write_bytes(file.read_bytes())
    weights = load_file(folder / "model.safetensors")
    gates = [name for name in weights if name.endswith("gate.wg.weight")]
    save_file(
        {name: torch.zeros_like(w) if name in gates else w for name, w in weights.items()}, folder / "model.safetensors"
    )
    given = {"model_name_or_path": str(folder), "vision_tower": str(full / "base" / "clip")}
    given |= {"data_path": str(full / "data" / "data.json"), "image_folder": str(full / "data" / "images")}
    # In transformers' Mixtral another two of equal ones win.
    frozen = {"train_modules": "gate_proj,up_proj", **RATES, "max_steps": 3, "export_format": "llava"}
    runs = {"idle-ep2": (2, {"ep_size": 2, **frozen}), "idle-ep1": (1, frozen)}
    for name, (stage, more) in runs.items():
        run_many(2, full / f"launch-{name}", [toy_run(given, full / name, ds_config(stage), **more)])
    assert losses(full / "idle-ep2") == pytest.approx(losses(full / "idle-ep1"), abs=1e-5)
    assert {row["experts/max_over_mean"] for row in read_metrics(full / "idle-ep2" / "run" / "metrics.jsonl")} == {2}


@pytest.mark.long
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_step_that_is_not_finite_and_a_flipped_bit_are_seen_on_all_ranks(tmp_path, precision):
    given = toy(tmp_path)
    faults = {"rank": 1, "where": "loss", "value": math.nan}
    runs = []
    for stage in range(3):
        more = {**RATES, **EP, "max_steps": 4, "bf16": precision == "bf16"}
        runs.append((toy_run(given, tmp_path / f"nan-{stage}", ds_config(stage), **more), {3: faults}))
    listed = tmp_path / "runs.json"
    listed.write_text(json.dumps([(command_line(flags), found) for flags, found in runs]))
    done = launch(2, ROOT / "tests" / "workers" / "disturbed.py", str(listed))
    assert done.returncode == 0, done.stdout + done.stderr
    for stage in range(3):
        rows = read_metrics(tmp_path / f"nan-{stage}" / "run" / "metrics.jsonl")
        assert [row["skipped_steps"] for row in rows] == [0, 0, 1, 1] and math.isfinite(rows[3]["loss"])
