"""bitsandbytes' 8-bit AdamW on two real ranks: groups, whole runs, resumed ones, at every ZeRO stage."""

import json

import pytest
import torch
import toys
from launching import losses, run_many, toy_run

from llava_ds.checkpoint.checkpoint_files import read_states
from llava_ds.checkpoint.commit import checkpoints

pytest.importorskip("bitsandbytes")
pytestmark = pytest.mark.long

STAGES = (0, 1, 2, 3)
BLOCK = {"type": "PagedAdam8bit", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}}


def states_of(file) -> list[dict]:
    """The states of each tensor in one of DeepSpeed's files, as bitsandbytes wraps them."""
    states = read_states(file)
    held = states.get("optimizer_state_dict") or states
    inner = next(held[key] for key in ("base_optimizer_state", "optimizer_state_dict", "optimizer") if key in held)
    return [state["__bnb_optimizer_quant_state__"] for state in inner["state"].values()]


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, dict]:
    """Runs of six steps with a checkpoint after three, by name: each was resumed from there, too, in a copy's place."""
    folder = tmp_path_factory.mktemp("eight-bit")
    base, data = toys.write_base(folder / "base"), toys.write_data(folder / "data", "itti" * 6)
    asked: dict[str, dict[str, object]] = {}
    for stage in STAGES:
        blocks = {"flag": {}, "json": {"optimizer": BLOCK}} if stage == 3 else {"flag": {}}
        for name, block in blocks.items():
            path = folder / f"{name}-{stage}.json"
            path.write_text(json.dumps({"zero_optimization": {"stage": stage}, "bf16": {"enabled": "auto"}, **block}))
            more = {"optim": "adamw_bnb_8bit"} if name == "flag" else {}
            more |= {"save_strategy": "steps", "save_steps": 3, "max_steps": 6, "weight_decay": 0.1, "bf16": stage == 1}
            asked[f"{name}-{stage}"] = toy_run(base | data, folder / f"run-{name}-{stage}", path, **more)
    plain = toy_run(base | data, folder / "run-32", folder / "flag-2.json", max_steps=6, weight_decay=0.1)
    run_many(2, folder / "launch-whole", [*asked.values(), plain], timeout_s=600)
    whole = {name: losses(run["output_dir"]) for name, run in asked.items()}
    for run in asked.values():
        (run["output_dir"] / "checkpoint-6").rename(run["output_dir"] / "taken-away")
    run_many(2, folder / "launch-resumed", list(asked.values()), timeout_s=600)
    resumed = {name: losses(run["output_dir"]) for name, run in asked.items()}
    folders = {name: run["output_dir"] for name, run in asked.items()}
    return {"whole": whole, "resumed": resumed, "folders": folders, "plain": losses(plain["output_dir"])}


def test_it_trains_almost_like_adamw_of_32_bits(runs):
    for name, curve in runs["whole"].items():
        assert curve[-1] < curve[0] - 0.1
        if name != "flag-1":  # in bfloat16
            assert curve == pytest.approx(runs["plain"], abs=0.05)
    assert runs["whole"]["flag-2"] != runs["plain"]


def test_a_resumed_run_ends_in_the_same_losses_bit_for_bit(runs):
    assert runs["resumed"] == runs["whole"]


def test_a_checkpoint_holds_states_of_8_bits_with_their_scales(runs):
    for name, folder in runs["folders"].items():
        (last, *_) = sorted(checkpoints(folder), reverse=True)
        files = sorted((last / "engine").glob("*optim_states.pt")) or [last / "engine" / "mp_rank_00_model_states.pt"]
        states = [state for file in files for state in states_of(file)]
        packed = [state for state in states if state["state1"].dtype == torch.uint8]
        assert packed, name
        for state in packed:
            assert len(state["absmax1"]) == -(-state["state1"].numel() // 256) == len(state["absmax2"])
