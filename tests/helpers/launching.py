"""Starting the real thing: the deepspeed launcher with CPU ranks."""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

from llava_ds.runtime.launchers import free_port

ROOT = Path(__file__).parents[2]
TRAIN = ROOT / "run" / "train.py"
DEEPSPEED = [str(Path(sys.executable).parent / "deepspeed"), "--log_level", "warning"]
SECRET = "planted-4f1c2e77"  # in the environment of all that is started: it may be found nowhere
RUN_MANY = ROOT / "tests" / "workers" / "run_many.py"


def launch(num_ranks: int, script: Path, *arguments: str, timeout_s: int = 900) -> subprocess.CompletedProcess:
    """Run a script on some CPU ranks through the deepspeed launcher, and return when it ended."""
    command = [*DEEPSPEED, "--num_accelerators", str(num_ranks), "--master_port", str(free_port())]
    return subprocess.run(
        [*command, str(script), *arguments], env=environment(), capture_output=True, text=True, timeout=timeout_s
    )


def environment() -> dict[str, str]:
    """This process's variables, without those of a launcher, and with what the real one needs to start CPU ranks."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "OMPI_", "PMI_"))}
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        kept.pop(name, None)
    path = f"{Path(sys.executable).parent}{os.pathsep}{kept['PATH']}"
    return {**kept, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PATH": path, "PLANTED_TOKEN": SECRET}


def run_many(
    num_ranks: int, folder: Path, runs: list[dict[str, object]], timeout_s: int = 900, finished: bool = True
) -> str:
    """Run run/train.py once per dict of flags, all in one launch. Returns the output; fails with it if a run failed.

    finished: whether the runs leave finished models, beside checkpoints.
    """
    folder.mkdir(parents=True, exist_ok=True)
    listed = folder / "runs.json"
    listed.write_text(json.dumps([command_line(flags) for flags in runs]))
    options = [] if finished else ["--unfinished"]
    done = launch(num_ranks, RUN_MANY, *options, str(listed), timeout_s=timeout_s)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def run_script(name: str, *arguments: object) -> None:
    """A script of run/ in this process, as a command line would run it; errors are raised."""
    before, sys.argv = sys.argv, [name, *map(str, arguments)]
    try:
        runpy.run_path(str(ROOT / "run" / name))["main"]()
    finally:
        sys.argv = before


def command_line(flags: dict[str, object]) -> list[str]:
    return [token for name, value in flags.items() for token in (f"--{name}", str(value))]


def toy_run(given: dict[str, str], output_dir: Path, config: str | Path, **more: object) -> dict[str, object]:
    """The flags of a short run on toys; given names model and data, all runs beside each other share their cache."""
    return {
        **given,
        "deepspeed_config": config,
        "output_dir": output_dir,
        "cache_dir": output_dir.parent / "cache",
        "model_max_length": 512,
        "train_batch_size": 4,
        "learning_rate": 2e-3,
        "mm_projector_lr": 1e-3,
        "save_strategy": "no",
        **more,
    }


def ds_config(stage: int) -> str:
    return str(ROOT / "ds_configs" / f"zero{stage}.json")


def tight_config(folder: Path) -> str:
    """ZeRO-3 as of a model that is larger than its limits: what was used is let go of, what comes next is fetched."""
    config = json.loads(Path(ds_config(3)).read_text())
    config["zero_optimization"] |= {
        "stage3_max_reuse_distance": 0,
        "stage3_prefetch_bucket_size": 300,
        "stage3_param_persistence_threshold": 0,
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "zero3_tight.json"
    path.write_text(json.dumps(config))
    return str(path)


def losses(output_dir: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (output_dir / "metrics.jsonl").read_text().splitlines()]
