"""Every file under ds_configs/ trains the same model, and what else a JSON can switch on does what it says."""

import json
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest
import toys
from deepspeed.ops.op_builder import AsyncIOBuilder
from known_flags import known
from launching import ROOT, losses, run_many, toy_run

STEPS = 20
CONFIGS = {path.stem: path for path in sorted((ROOT / "ds_configs").glob("*.json"))}


def needs(name: str) -> str | None:
    """The first requirement of a file that this machine lacks; None if it has all."""
    if "offload" in name or "infinity" in name:
        if shutil.which("c++") is None:
            return "DeepSpeed's CPU Adam needs a C++ compiler"
        if "infinity" in name and not AsyncIOBuilder().is_compatible():
            return "DeepSpeed's asynchronous reading and writing needs libaio with its headers"
    return None


def inputs(folder: Path) -> dict[str, str]:
    return toys.write_base(folder / "base") | toys.write_data(folder / "data", "itittiii" * 10)


def flags_of(given: dict, folder: Path, name: str, config: Path, **more: object) -> dict[str, object]:
    more = {
        "warmup_ratio": 0.1,
        "weight_decay": 0.1,
        "max_grad_norm": 1.0,
        "max_steps": STEPS,
        **more,
    }
    return toy_run(given, folder / name, config, **more)


def written(folder: Path, name: str, config: dict) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(json.dumps(config))
    return path


# In bf16 one last digit flips others: exact equality needs the same arithmetic. There are two places where a file has
# another than ZeRO-1, and the same arithmetic elsewhere: DeepSpeed's CPU Adam rounds otherwise than
# torch's, and ZeRO-3's own linear layer adds the bias in a step of its own.
OFFLOADED_1 = {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}}
LINEAR_3 = {"zero_optimization": {"stage": 3, "memory_efficient_linear": False}}
LINEAR_3_OFFLOADED = {"zero_optimization": {**LINEAR_3["zero_optimization"], "offload_optimizer": {"device": "cpu"}}}


@pytest.fixture(scope="module")
def curves(tmp_path_factory) -> dict[str, list[float]]:
    """Loss curves on two ranks: of all files in fp32 by name, and in bf16, unclipped, by name and "-bf16"."""
    folder = tmp_path_factory.mktemp("configs")
    given = inputs(folder)
    files = {name: path for name, path in CONFIGS.items() if needs(name) is None}
    extra = {"linear": LINEAR_3}
    if needs("offload") is None:
        extra |= {"offloaded": OFFLOADED_1, "linear_offloaded": LINEAR_3_OFFLOADED}
    files |= {name: written(folder, name, config) for name, config in extra.items()}
    # Once a process has trained with ZeRO-3's linear layer, DeepSpeed leaves it in torch: those come last.
    last = [name for name in files if name.startswith("zero3")]
    todo = {}
    for name in [*(name for name in files if name not in last), *last]:
        run = f"{name}-bf16"
        todo[run] = flags_of(given, folder, run, files[name], bf16=True, max_grad_norm=0.0)
    for name in set(CONFIGS) & set(files):
        todo[name] = flags_of(given, folder, name, files[name])
    run_many(2, folder / "launch", list(todo.values()), timeout_s=3000)
    return {run: losses(folder / run) for run in todo}


@pytest.mark.long
@pytest.mark.parametrize("name", CONFIGS)
def test_every_file_trains_the_same_model(curves, name):
    if missing := needs(name):
        pytest.skip(missing)
    assert len(curves[name]) == STEPS and curves["zero0"][-1] < curves["zero0"][0] - 1
    assert curves[name] == pytest.approx(curves["zero0"], abs=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("name", CONFIGS)
def test_every_file_trains_the_same_model_in_bf16(curves, name):
    if missing := needs(name):
        pytest.skip(missing)
    assert curves[f"{name}-bf16"] == pytest.approx(curves["zero1-bf16"], abs=0.02)
    if name in ("zero0", "zero1", "zero2"):
        assert curves[f"{name}-bf16"] == curves["zero1-bf16"]


@pytest.mark.long
def test_in_bf16_the_difference_is_the_linear_layer_and_the_cpus_adam(curves):
    assert curves["linear-bf16"] == curves["zero1-bf16"]
    if missing := needs("offload"):
        pytest.skip(missing)
    assert curves["zero2_offload-bf16"] == curves["offloaded-bf16"]
    assert curves["linear_offloaded-bf16"] == pytest.approx(curves["offloaded-bf16"], abs=0.02)


# What else a JSON can ask for on two ranks; none of it may change the loss.
TWO, THREE = {"zero_optimization": {"stage": 2}}, {"zero_optimization": {"stage": 3}}
FEATURES = {
    "plain": TWO,
    "monitors": {
        **TWO,
        "csv_monitor": {"enabled": True, "job_name": "csv"},
        "tensorboard": {"enabled": find_spec("tensorboard") is not None},
    },
    "profilers": {
        **TWO,
        "wall_clock_breakdown": True,
        "memory_breakdown": True,
        "dump_state": True,
        "flops_profiler": {"enabled": True, "profile_step": 3, "top_modules": 3},
        "comms_logger": {"enabled": True},
    },
    "cpu_checkpointing": {**THREE, "activation_checkpointing": {"cpu_checkpointing": True}},
    "offload_by_torch": {
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
        "zero_force_ds_cpu_optimizer": False,
    },
}
LONG_FEATURES = {
    "within_a_node": {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2}},
}
FEATURE_STEPS = 4


def trained(folder: Path, features: dict, **compiled: object) -> str:
    """Train with every JSON, and once compiled where that is asked for. Returns what was printed."""
    given, runs = inputs(folder), []
    for name, config in features.items():
        if name == "profilers":
            config["flops_profiler"]["output_file"] = str(folder / "flops.txt")
        path = written(folder / "json", name, config)
        runs.append(flags_of(given, folder, name, path, max_steps=FEATURE_STEPS))
    if compiled:
        runs.append(
            flags_of(given, folder, "compiled", folder / "json/plain.json", max_steps=FEATURE_STEPS, **compiled)
        )
    return run_many(2, folder / "launch", runs)


@pytest.fixture(scope="module")
def features(tmp_path_factory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("features")
    return folder, trained(folder, FEATURES)


@pytest.mark.long
@pytest.mark.parametrize("name", FEATURES)
def test_nothing_changes_the_loss(features, name):
    folder, _ = features
    assert losses(folder / name) == pytest.approx(losses(folder / "plain"), abs=1e-5)


@pytest.mark.long
def test_neither_compiling_nor_sharding_within_a_node_changes_it(tmp_path):
    how = {"gradient_checkpointing": True}
    if known(["torch_compile"]):
        how |= {"torch_compile": True, "torch_compile_backend": "eager"}
    trained(tmp_path, {"plain": FEATURES["plain"], **LONG_FEATURES}, **how)
    for name in (*LONG_FEATURES, "compiled"):
        assert losses(tmp_path / name) == pytest.approx(losses(tmp_path / "plain"), abs=1e-5)


@pytest.mark.long
def test_monitors_write_rates_and_losses_into_the_output_folder(features):
    folder, _ = features
    rows = (folder / "monitors" / "csv" / "Train_Samples_train_loss.csv").read_text().split()
    assert rows[0] == "step,train_loss"
    steps, values = zip(*(map(float, row.split(",")) for row in rows[1:]))
    assert steps == (4, 8, 12, 16)  # DeepSpeed counts samples
    assert list(values) == pytest.approx(losses(folder / "monitors"))
    assert (folder / "monitors" / "csv" / "Train_Samples_lr.csv").exists()
    events = list((folder / "monitors").rglob("events.out.tfevents.*"))
    assert bool(events) == (find_spec("tensorboard") is not None)


@pytest.mark.long
def test_timers_and_profilers_say_what_they_measured(features):
    folder, output = features
    assert output.count("bwd_allreduce_microstep") >= FEATURE_STEPS
    assert "Engine after backward" in output and "CPU Virtual Memory" in output
    assert "dump_state" in output and "DeepSpeedEngine configuration" in output
    assert "fwd+bwd FLOPS per GPU" in (folder / "flops.txt").read_text()
    assert "all_reduce" in output and "Message Size" in output
