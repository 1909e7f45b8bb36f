"""Runs of run/train.py in one process, timed and with their batches noted: recorded_run.py JOBS.json

Started by run/dev/compare_trl.py. JOBS.json is a list of jobs: the flags, what is noted, and the file that gets it.
"""

import importlib.util
import itertools
import json
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from unittest.mock import patch

import torch

import llava_ds.train.session
from llava_ds.constants import IGNORE_INDEX
from llava_ds.files.jsonl import read_metrics
from llava_ds.model.vision import VisionTower
from llava_ds.train.rollouts import Rollouts
from llava_ds.train.sampling import Answer
from llava_ds.train.session import Session

TRAIN = Path(__file__).parents[2] / "train.py"


class Notes:
    """What a run did: seconds of its steps, tiles through its towers, samples and rollouts."""

    def __init__(self, job: dict) -> None:
        self.job = job
        self.marks: list[tuple[float, float]] = []
        self.left_out = [0.0, 0.0]
        self.tiles = {"before": 0, "reference": 0, "steps": 0, "drawing": 0}
        self.phase = "before"
        self.reference = {"wall_s": 0.0, "cpu_s": 0.0}
        self.batches: list[list] = []
        self.rollouts: list[list[dict]] = []
        self.given = json.loads(Path(job["rollouts"]).read_text()) if job.get("rollouts") else None

    def windows(self, original):
        """Session.windows that notes the time at every step's begin."""

        def noted(session: Session):
            if self.job.get("records_batches"):
                self._note_batches(session.plan.steps)
            self.before = self._now()
            self.phase = "steps"
            for window in original(session):
                yield window
                self.marks.append(self._now())

        return noted

    def _now(self) -> tuple[float, float]:
        now = time.perf_counter(), time.process_time()
        return tuple(at - less for at, less in zip(now, self.left_out))

    def _note_batches(self, steps) -> None:
        """(ids, supervised ids) of every sample of every step, chosen answers first; image positions are negative."""
        for layout in steps.after(0):
            pairs = [steps.dataset[i] for i in layout.samples]
            samples = [pair.chosen for pair in pairs] + [pair.rejected for pair in pairs]
            rows = [[s.input_ids.tolist(), s.labels[s.labels != IGNORE_INDEX].tolist()] for s in samples]
            self.batches.append(rows)

    def tower(self, original):
        """VisionTower.forward that counts tiles."""

        def counted(tower, pixel_values, *args, **kwargs):
            self.tiles[self.phase] += len(pixel_values)
            return original(tower, pixel_values, *args, **kwargs)

        return counted

    def draw(self, original):
        """Rollouts._draw whose time is left out, and which gives back recorded answers where there are some."""

        def drawn(rollouts, turn, slots, prompts):
            began = time.perf_counter(), time.process_time()
            self.phase = "drawing"
            if self.given is None:
                answers = original(rollouts, turn, slots, prompts)
            else:
                by_id = {group["id"]: group["answers"] for group in self.given[turn[0] - 1]}
                answers = [
                    [Answer(tuple(a["ids"]), tuple(a["log_probs"]), a["entropy"], a["ended"]) for a in by_id[p.id]]
                    for p in prompts
                ]
            self.phase = "steps"
            ended = time.perf_counter(), time.process_time()
            self.left_out = [so_far + b - a for so_far, a, b in zip(self.left_out, began, ended)]
            return answers

        return drawn

    def reference_pass(self, original):
        """The function add_reference that notes its time."""

        def noted(*args):
            began, self.phase = (time.perf_counter(), time.process_time()), "reference"
            line = original(*args)
            ended, self.phase = (time.perf_counter(), time.process_time()), "before"
            self.reference = {name: b - a for name, a, b in zip(self.reference, began, ended)}
            return line

        return noted

    def score(self, original):
        """Rollouts._score that notes prompts, answers and rewards."""

        def scored(rollouts, prompts, answers):
            groups = original(rollouts, prompts, answers)
            if self.given is None:
                self.rollouts.append([self._row(group) for group in groups])
            return groups

        return scored

    def _row(self, group) -> dict[str, object]:
        asked = group.prompt
        return {
            "id": asked.id,
            "prompt_ids": asked.sample.input_ids.tolist(),
            "answers": [vars(answer) for answer in group.answers],
            "rewards": group.rewards.tolist(),
        }

    def result(self, output_dir: Path) -> dict[str, object]:
        """All of it, with the log. The last step has no end here."""
        marks = [self.before, *self.marks]
        walls, cpus = zip(*marks)
        steps = {"wall_s": walls, "cpu_s": cpus}
        return {
            "log": read_metrics(output_dir / "metrics.jsonl"),
            "batches": self.batches,
            "tiles": self.tiles,
            "rollouts": self.rollouts,
            "reference": self.reference,
            **{name: [b - a for a, b in itertools.pairwise(each)] for name, each in steps.items()},
        }


def run(train, job: dict) -> dict[str, object]:
    """Run once. train: run/train.py as a module; nothing is exported."""
    notes = Notes(job)
    with ExitStack() as stack:
        for owner, name, make in (
            (Session, "windows", notes.windows), (VisionTower, "forward", notes.tower),
            (Rollouts, "_draw", notes.draw), (Rollouts, "_score", notes.score),
            (llava_ds.train.session, "add_reference", notes.reference_pass),
        ):  # fmt: skip
            stack.enter_context(patch.object(owner, name, make(getattr(owner, name))))
        stack.enter_context(patch.object(train, "finish", lambda session: session.trackers.close()))
        train.main([token for name, value in job["flags"].items() for token in (f"--{name}", str(value))])
    return notes.result(Path(job["flags"]["output_dir"]))


def main() -> None:
    """Do the jobs, one after the other."""
    torch.set_num_threads(1)
    spec = importlib.util.spec_from_file_location("train", TRAIN)
    train = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(train)
    for job in json.loads(Path(sys.argv[1]).read_text()):
        Path(job["result"]).write_text(json.dumps(run(train, job)))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
