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
from typing import ClassVar

from llava_ds.files.writing import run_folder
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
    """This process's variables, without a launcher's variables, and with those that the real launcher needs for CPU
    ranks."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "OMPI_", "PMI_"))}
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "PYTEST_CURRENT_TEST"):
        kept.pop(name, None)
    path = f"{Path(sys.executable).parent}{os.pathsep}{kept['PATH']}"
    return {**kept, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PATH": path, "PLANTED_TOKEN": SECRET}


class Served:
    """A launch of run_many.py that runs request after request until a request to end.

    Starting two ranks takes 20 seconds of processor time, so a test process keeps one launch per number of ranks.
    """

    kept: ClassVar[dict[int, "Served"]] = {}

    def __init__(self, what: tuple, num_ranks: int):
        self.what, self.count, self.read, self.has_failed = what, 0, 0, False
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
    def of(cls, num_ranks: int) -> "Served":
        """Return the running launch if it has these ranks and variables; else replace it by a new one."""
        what = (Path.cwd(), environment())
        there = cls.kept.get(num_ranks)
        if there is None or there.what != what or there.process.poll() is not None:
            cls.end(num_ranks)
            cls.kept[num_ranks] = cls(what, num_ranks)
        return cls.kept[num_ranks]

    @classmethod
    def end(cls, *nums_ranks: int) -> None:
        """Let launches end, where they are there. Fails if one does not, or not well."""
        there = [cls.kept.pop(num_ranks) for num_ranks in nums_ranks if num_ranks in cls.kept]
        running = [launch for launch in there if not launch.has_failed]  # as far as tests know
        for launch in running:
            launch.put(None)
        outputs = [launch.output_at_end() for launch in running]
        for launch in there:
            shutil.rmtree(launch.folder)
        assert not any(outputs), f"not ended well after all runs: {outputs}"

    def output_at_end(self) -> str:
        """Return "" on success, else its output."""
        try:
            code = self.process.wait(120)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            code = "none within 120 s"
        written = (self.folder / "output").read_text(errors="replace")[-5000:]
        return "" if code == 0 else f"exit code {code}: {written}"

    def put(self, request: object) -> Path:
        """Send the request; return the file that appears when it is done."""
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
            self.has_failed = True
            if self.process.poll() is None:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()
            raise AssertionError(f"not done after {timeout_s} s, or ended: {text}")
        return text


def run_many(
    num_ranks: int, folder: Path, runs: list[dict[str, object]], timeout_s: int = 900, finished: bool = True
) -> str:
    """Run run/train.py once per dict of flags, all in one launch. Returns the output; fails with it if a run failed.

    finished: True if the runs export finished models in addition to checkpoints.
    """
    folder.mkdir(parents=True, exist_ok=True)
    request = {"finished": finished, "runs": [command_line(flags) for flags in runs], "port": free_port()}
    return Served.of(num_ranks).run(request, timeout_s)


def run_script(name: str, *arguments: object) -> None:
    """A script of run/ in this process, as a command line would run it; errors are raised."""
    runpy.run_path(str(ROOT / "run" / name))["main"]([*map(str, arguments)])


def command_line(flags: dict[str, object]) -> list[str]:
    return [token for name, value in flags.items() for token in (f"--{name}", str(value))]


def toy_run(given: dict[str, str], output_dir: Path, config: str | Path, **more: object) -> dict[str, object]:
    """The flags of a short run on toys, with the given model and data; runs in the same folder share their cache."""
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
    """ZeRO-3 settings under which parameters are released after use and prefetched, as for a large model."""
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
    return [json.loads(line)["loss"] for line in (run_folder(output_dir) / "metrics.jsonl").read_text().splitlines()]
