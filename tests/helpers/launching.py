"""Starting the real thing: the deepspeed launcher with CPU ranks."""

import json
import os
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from llava_ds.runtime.launchers import free_port

ROOT = Path(__file__).parents[2]
TRAIN = ROOT / "run" / "train.py"
DEEPSPEED = [str(Path(sys.executable).parent / "deepspeed"), "--log_level", "warning"]
SECRET = "planted-4f1c2e77"  # in the environment of all that is started: it may be found nowhere
RUN_MANY = ROOT / "tests" / "workers" / "run_many.py"
AXES = ("sequence_parallel_size", "tensor_parallel_size", "pipeline_parallel_size", "ep_size")


def launch(num_ranks: int, script: Path, *arguments: str, timeout_s: int = 900) -> subprocess.CompletedProcess:
    """Run a script on some CPU ranks through the deepspeed launcher, and return when it ended."""
    command = [*DEEPSPEED, "--num_accelerators", str(num_ranks), "--master_port", str(free_port())]
    return subprocess.run(
        [*command, str(script), *arguments], env=environment(), capture_output=True, text=True, timeout=timeout_s
    )


def environment() -> dict[str, str]:
    """This process's variables, without those of a launcher, and with what the real one needs to start CPU ranks."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "OMPI_", "PMI_"))}
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "PYTEST_CURRENT_TEST"):
        kept.pop(name, None)
    path = f"{Path(sys.executable).parent}{os.pathsep}{kept['PATH']}"
    return {**kept, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PATH": path, "PLANTED_TOKEN": SECRET}


class Served:
    """A launch of run_many.py that runs what it is asked for, request by request, until it is told to end.

    Starting two ranks takes 20 seconds of processor time; so a test process keeps the last launch for who comes next.
    """

    now: "Served | None" = None

    def __init__(self, what: tuple, num_ranks: int):
        self.what, self.count, self.read = what, 0, 0
        self.folder = Path(tempfile.mkdtemp(prefix="served-"))
        command = [*DEEPSPEED, "--num_accelerators", str(num_ranks), "--master_port", str(free_port()), str(RUN_MANY)]
        with (self.folder / "output").open("wb") as output:
            self.process = subprocess.Popen(
                [*command, str(self.folder), str(os.getpid())],
                env=environment(),
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @classmethod
    def of(cls, num_ranks: int, runs: list[dict[str, object]]) -> "Served":
        """The launch that is there, if it has these ranks, variables and meshes; else a new one in its place."""
        # The groups of ranks are made once in a process: it has one mesh, or the meshes of one request.
        meshes = {tuple(flags.get(axis, 1) for axis in AXES) for flags in runs}
        what = (num_ranks, Path.cwd(), environment(), meshes)
        if cls.now is None or cls.now.what != what or len(meshes) > 1 or cls.now.process.poll() is not None:
            cls.end()
            cls.now = cls(what, num_ranks)
        return cls.now

    @classmethod
    def end(cls) -> None:
        """Let the launch end, if one is there. Fails if it does not, or not well."""
        there, cls.now = cls.now, None
        if there is not None:
            has_failed = there.process.poll() is not None  # which its test knows
            there.put(None)
            try:
                code = there.process.wait(120)
            except subprocess.TimeoutExpired:
                os.killpg(there.process.pid, signal.SIGKILL)
                code = "none within 120 s"
            output = (there.folder / "output").read_text(errors="replace")[-5000:]
            shutil.rmtree(there.folder)
            assert has_failed or code == 0, f"exit code {code} after all runs: {output}"

    def put(self, request: object) -> Path:
        """Ask for it; the file that is there when it is done."""
        whole = self.folder / f"{self.count}.json"
        whole.with_suffix(".part").write_text(json.dumps(request))
        whole.with_suffix(".part").rename(whole)
        self.count += 1
        return whole.with_suffix(".done")

    def run(self, request: object, timeout_s: float) -> str:
        """Its output; fails with it if the launch ends before it is done, or is not done in time."""
        done, until = self.put(request), time.monotonic() + timeout_s
        while not done.exists() and self.process.poll() is None and time.monotonic() < until:
            time.sleep(0.02)
        output = (self.folder / "output").read_bytes()[self.read :]
        self.read += len(output)
        text = output.decode(errors="replace")
        if not done.exists():
            if self.process.poll() is None:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()
            raise AssertionError(f"not done after {timeout_s} s, or ended: {text}")
        return text


def run_many(
    num_ranks: int, folder: Path, runs: list[dict[str, object]], timeout_s: int = 900, finished: bool = True
) -> str:
    """Run run/train.py once per dict of flags, all in one launch. Returns the output; fails with it if a run failed.

    finished: whether the runs leave finished models, beside checkpoints.
    """
    folder.mkdir(parents=True, exist_ok=True)
    request = {"finished": finished, "runs": [command_line(flags) for flags in runs]}
    return Served.of(num_ranks, runs).run(request, timeout_s)


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
