"""Both sides of run/dev/compare_trl.py: the same jobs by run/train.py and by TRL, each in a process of its own."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from llava_ds.constants import ConfigError
from llava_ds.runtime.launchers import free_port

PARTS = Path(__file__).parent
ROOT = PARTS.parents[2]


@dataclass
class Sides:
    """Both sides. trl_python: the interpreter of TRL's environment; model: an exported LLaVA; folder: of all files;
    versions: TRL's, known after its first run."""

    trl_python: str
    model: Path
    folder: Path
    versions: dict[str, str] = field(default_factory=dict)

    def ours(self, jobs: dict[str, dict]) -> dict[str, dict]:
        """Run run/train.py on one rank once a job; returns what was noted, by the jobs' names."""
        launched = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
        paths = {"PYTHONPATH": os.pathsep.join((str(ROOT), str(PARTS.parent)))}
        environ = {**launched, **paths, "MASTER_PORT": str(free_port()), "DS_ACCELERATOR": "cpu"}
        return self._run([sys.executable, str(PARTS / "recorded_run.py")], jobs, environ)

    def trl(self, jobs: dict[str, dict]) -> dict[str, dict]:
        """Run TRL's trainer once a job; returns what was noted, by the jobs' names."""
        jobs = {name: {"model": str(self.model), **job} for name, job in jobs.items()}
        quiet = {"HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1", "HF_DATASETS_CACHE": str(self.folder / "trl")}
        done = self._run([self.trl_python, str(PARTS / "trl_side.py")], jobs, quiet)
        self.versions = next(iter(done.values()))["versions"]
        return {name: result["found"] for name, result in done.items()}

    def _run(self, command: list[str], jobs: dict[str, dict], environ: dict[str, str]) -> dict[str, dict]:
        """Run a side's script on one thread, and read its results. Raises ConfigError with the end of its log."""
        side = Path(command[-1]).stem
        results = {name: self.folder / f"{side}-{i}.json" for i, name in enumerate(jobs)}
        listed, log = self.folder / f"{side}-jobs.json", self.folder / f"{side}.log"
        todo = [{**job, "result": str(results[name])} for name, job in jobs.items()]
        listed.write_text(json.dumps(todo, default=str))
        kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
        environ = {**kept, "OMP_NUM_THREADS": "1", **environ}
        with log.open("w") as file:
            done = subprocess.run([*command, str(listed)], env=environ, stdout=file, stderr=subprocess.STDOUT)
        if done.returncode:
            raise ConfigError(f"{command[-1]} failed, its log is {log}:\n{log.read_text()[-3000:]}")
        return {name: json.loads(path.read_text()) for name, path in results.items()}

    def flags(self, data: Path, name: str) -> dict[str, object]:
        """Flags of run/train.py by which both sides do the same. data: the folder with data.json and images."""
        return {
            "model_name_or_path": self.model,
            "deepspeed_config": ROOT / "ds_configs" / "zero2.json",
            "data_path": data / "data.json",
            "image_folder": data,
            "cache_dir": self.folder / "cache",
            "output_dir": self.folder / "runs" / name.replace(" ", "-").replace(",", ""),
            "version": "v1",
            "shuffle": False,
            "lr_scheduler_type": "constant",
            "save_strategy": "no",
            "report_to": "none",
            "dataloader_num_workers": 0,
        }

    @property
    def image_id(self) -> int:
        """The id that stands at the positions of features in transformers' ids."""
        return json.loads((self.model / "config.json").read_text())["image_token_index"]
