"""Every optimizer at every ZeRO stage in every precision that it is supposed to work in, on two real ranks."""

import json
import math
from pathlib import Path

import pytest
import toys
from launching import ROOT, command_line, launch, losses, run_many, toy_run

WORKER = ROOT / "tests" / "workers" / "optimizers.py"
STAGES = (0, 1, 2, 3)
PRECISIONS = {
    "fp32": ({}, "torch.float32"),
    "bf16": ({"bf16": {"enabled": True}}, "torch.bfloat16"),
    "bf16, gradients in fp32": (
        {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}},
        "torch.bfloat16",
    ),
    "fp16": (
        {"fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 4, "loss_scale_window": 2, "hysteresis": 1}},
        "torch.float16",
    ),
    "fp16, static": ({"fp16": {"enabled": True, "loss_scale": 128}}, "torch.float16"),
    # After one engine with autocast DeepSpeed takes every later one in the process for such a one: they come last.
    "autocast": ({"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}, "torch.bfloat16"),
    "autocast, fp16": ({"torch_autocast": {"enabled": True, "dtype": "float16"}}, "torch.float16"),
}
# The optimizer block, or None for AdamW by flags.
BLOCKS = {
    "none": None,
    **{
        name: {"type": name, "params": {"torch_adam": True} if name in ("AdamW", "Adam", "Muon") else {}}
        for name in (
            *("AdamW", "Adam", "Adagrad", "Muon", "ASGD", "Adadelta", "Adafactor", "Adamax", "NAdam", "RAdam"),
            *("RMSprop", "Rprop", "SGD"),
        )
    },
}
# What looks at more than each weight's own gradient is another optimizer on shards.
ON_SHARDS_ANOTHER = {"Adafactor"}
RATE, PROJECTOR_RATE = 1e-2, 5e-3


def case(name: str, precision: str, stage: int) -> dict:
    zero: dict[str, object] = {"stage": stage}
    if name == "Muon" and stage == 3:
        zero["reduce_scatter"] = False
    config = {"zero_optimization": zero, "zero_allow_untested_optimizer": True, **PRECISIONS[precision][0]}
    if BLOCKS[name] is not None:
        config["optimizer"] = BLOCKS[name]
    flags = {
        "learning_rate": RATE,
        "mm_projector_lr": PROJECTOR_RATE,
        "weight_decay": 0.0 if name == "Rprop" else 0.1,
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 2,
        # Under ZeRO, DeepSpeed clips Muon's updates, and autocast's scaled gradients.
        "max_grad_norm": 0.0 if name == "Muon" or precision == "autocast, fp16" else 0.5,
    }
    # There is no GPU: float16 is refused on the CPU, for DeepSpeed would, and is tried on one all the same.
    device_type = "cuda" if "fp16" in precision else "cpu"
    return {"name": f"{name}, {precision}, {stage}", "config": config, "flags": flags, "device_type": device_type}


def possible(name: str, precision: str, stage: int) -> bool:
    if precision in ("bf16, gradients in fp32", "fp16", "fp16, static") and stage == 0:
        return False
    return not (name == "Muon" and precision == "autocast, fp16" and stage > 0)


def ask(folder: Path, cases: list[dict], timeout_s: int = 1200) -> dict[str, dict]:
    folder.mkdir(exist_ok=True)
    listed = folder / "cases.json"
    listed.write_text(json.dumps(cases))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_COMPILE_DISABLE", "1")  # compiling Muon's update takes longer than everything else
        done = launch(2, WORKER, str(listed), timeout_s=timeout_s)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(listed.with_name("answers.json").read_text()) | {"said": done.stdout}


def whole_run(base: dict, data: dict, folder: Path, name: str, config: dict, **more: object) -> dict[str, object]:
    path = folder / f"{name}.json"
    path.write_text(json.dumps(config))
    return toy_run(base | data, folder / name, path, **{"max_steps": 6, "verbose": True, **more})


def whole_case(flags: dict[str, object]) -> dict:
    return {"name": flags["output_dir"].name, "argv": command_line(flags)}


AUTO = dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")
ADAMW = {"type": "AdamW", "params": AUTO}
WARMUP = {"type": "WarmupCosineLR", "params": {"warmup_num_steps": "auto", "total_num_steps": "auto"}}


# What is run every day: what DeepSpeed treats apart at every stage, the others at stage 3, and every precision.
APART = ("none", "AdamW", "Adagrad", "Muon", "SGD")
DAILY = [(name, "fp32", stage) for name in BLOCKS for stage in (STAGES if name in APART else (3,))]
DAILY += [
    ("AdamW", precision, stage)
    for precision, stages in (
        ("bf16", STAGES),
        ("bf16, gradients in fp32", (1, 3)),
        ("fp16", (1, 2)),
        ("fp16, static", (1, 3)),
        ("autocast", (0, 3)),
        ("autocast, fp16", (0, 1)),
    )
    for stage in stages
]
OVERFLOW = {"fp16": {"enabled": True, "initial_scale_power": 40, "hysteresis": 1, "min_loss_scale": 1}}


@pytest.fixture(scope="module")
def daily(tmp_path_factory) -> dict[str, dict]:
    """The answers by name; "folder" has what the whole runs left, "said" what was printed."""
    folder = tmp_path_factory.mktemp("optimizers")
    base, data = toys.write_base(folder / "base"), toys.write_data(folder / "data", "itti" * 6)
    of_json = {"zero_optimization": {"stage": 2}, "optimizer": ADAMW, "scheduler": WARMUP}
    autocast = {"zero_optimization": {"stage": 3}, "torch_autocast": {"enabled": True}}
    overflow = case("AdamW", "fp16", 1) | {"name": "overflow"}
    overflow["config"] = {**overflow["config"], **OVERFLOW}
    first = [overflow, whole_case(whole_run(base, data, folder, "json", of_json, warmup_steps=2))]
    in_order = sorted(DAILY, key=lambda key: list(PRECISIONS).index(key[1]))
    last = [whole_case(whole_run(base, data, folder, "autocast", autocast, gradient_checkpointing=True))]
    return ask(folder, [*first, *(case(*key) for key in in_order), *last]) | {"folder": folder}


def check_case(answers: dict[str, dict], name: str, precision: str, stage: int) -> None:
    """It trained, in the precision that was meant, with its groups, and like the lowest stage."""
    answer = answers[f"{name}, {precision}, {stage}"]
    assert "losses" in answer, answer
    curve, rates = answer["losses"], answer["rates"]
    assert all(map(math.isfinite, curve)) and curve[-1] < curve[0] and answer["skipped"] == 0
    assert answer["computed_in"] == PRECISIONS[precision][1]
    decay = 0.0 if name == "Rprop" else 0.1
    meant = [(RATE, decay), (RATE, 0.0), (PROJECTOR_RATE, decay), (PROJECTOR_RATE, 0.0)]
    if name == "Muon":
        meant.insert(1, (RATE, decay))  # the language model's matrices, and its embeddings and output layer
    assert [tuple(group) for group in answer["groups"]] == meant
    for step, now in enumerate(rates):
        cosine = 0.5 * (1 + math.cos(math.pi * step / len(rates)))
        assert now == pytest.approx([rate * cosine for rate, _ in meant])
    reference = next(answers[key]["losses"] for key in answers if key.startswith(f"{name}, {precision}, "))
    if name not in ON_SHARDS_ANOTHER:
        # Stages reduce gradients in another order, which counts in half precision; 0 and 1 in the same.
        exact = precision == "fp32" or (precision == "bf16" and stage == 1 and name != "Muon")
        largest = max(abs(a - b) for a, b in zip(curve, reference))
        assert largest < (1e-5 if exact else 5e-3)


@pytest.mark.long
@pytest.mark.parametrize(("name", "precision", "stage"), DAILY)
def test_it_trains_with_its_groups_and_alike_at_every_stage(daily, name, precision, stage):
    check_case(daily, name, precision, stage)


@pytest.mark.long
@pytest.mark.parametrize("stage", STAGES)
def test_adamw_of_the_json_is_adamw_by_flags(daily, stage):
    """The JSON's is torch's plain one, that of the flags its fused one, which rounds otherwise."""
    by_flags = daily[f"none, fp32, {stage}"]["losses"]
    assert daily[f"AdamW, fp32, {stage}"]["losses"] == pytest.approx(by_flags, rel=1e-6)


@pytest.mark.long
def test_the_loss_scale_is_the_jsons(daily):
    assert daily["AdamW, fp16, 1"]["scale"] == daily["AdamW, fp16, 2"]["scale"] == 2**5  # doubled after the window
    assert daily["AdamW, fp16, static, 3"]["scale"] == 128


@pytest.mark.long
def test_an_overflow_is_skipped_and_lowers_the_scale(daily):
    assert daily["overflow"]["skipped"] == 4 and daily["overflow"]["scale"] == 2**36
    assert len(set(daily["overflow"]["losses"])) == 1


@pytest.mark.long
def test_all_optimizers_in_all_precisions_at_all_stages(tmp_path):
    keys = [(n, p, s) for p in PRECISIONS for n in BLOCKS for s in STAGES if possible(n, p, s)]
    answers = ask(tmp_path, [case(*key) for key in keys])
    wrong = []
    for key in keys:
        try:
            check_case(answers, *key)
        except AssertionError as error:
            wrong.append(f"{key}: {error}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.long
def test_a_whole_run_with_optimizer_and_schedule_of_the_json(daily):
    folder, said = daily["folder"], daily["said"]
    assert "optimizer.params.lr" in said and "schedule WarmupCosineLR from the DeepSpeed JSON" in said
    rows = [json.loads(line) for line in (folder / "json" / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [len(row["lr"]) for row in rows] == [4] * 6
    assert [row["lr"][0] for row in rows[:3]] == [0, 0, 2e-3]  # DeepSpeed's own beginning
    assert all(row["lr"][2] == pytest.approx(row["lr"][0] / 2) for row in rows)
    assert losses(folder / "json")[-1] < losses(folder / "json")[0] - 0.2


@pytest.mark.long
def test_a_whole_run_with_autocast_exports_its_fp32_weights(daily):
    curve = losses(daily["folder"] / "autocast")
    assert curve[-1] < curve[0] - 0.2
    assert daily["said"].count("reloaded with transformers, logits differ by 0.0e+00") == 2


@pytest.mark.long
def test_a_resumed_run_ends_in_the_same_losses_with_optimizers_and_schedules_of_the_json(tmp_path):
    folder = tmp_path
    base, data = toys.write_base(folder / "base"), toys.write_data(folder / "data", "itti" * 6)
    blocks = {"muon": {"type": "Muon"}, "adagrad": {"type": "Adagrad"}, "adamw": ADAMW}
    runs = []
    for name, block in blocks.items():
        for stage in STAGES:
            zero = {"stage": stage, **({"reduce_scatter": False} if name == "muon" else {})}
            params = {"cycle_min_lr": 1e-4, "cycle_first_step_size": 3, "cycle_momentum": name == "adamw"}
            config = {
                "zero_optimization": zero,
                "optimizer": block,
                "scheduler": {"type": "OneCycle", "params": params},
            }
            more = {"save_strategy": "steps", "save_steps": 3, "bf16": stage < 2}
            runs.append(whole_run(base, data, folder, f"{name}-{stage}", config, **more))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_COMPILE_DISABLE", "1")
        run_many(2, folder / "launch-whole", runs, timeout_s=600)
        whole = [losses(run["output_dir"]) for run in runs]
        for run in runs:
            (run["output_dir"] / "checkpoint-6").rename(run["output_dir"] / "taken-away")
        run_many(2, folder / "launch-resumed", runs, timeout_s=600)
    assert [losses(run["output_dir"]) for run in runs] == whole
