"""kill -9 while a run tries its export, or writes it: the next start in that folder removes what was left."""

import os
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import toys
from exporting import export_plan
from llavas import arguments

from llava_ds.engine.construct import build_model
from llava_ds.export import output_folder, trial
from llava_ds.export.output_folder import staged
from llava_ds.model.open.model_plan import plan_model
from llava_ds.runtime.ranks import Ranks

pytestmark = pytest.mark.faults


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    args = arguments(toys.write_base(tmp_path_factory.mktemp("base")))
    planned = plan_model(args.model, 512)
    ranks = Ranks(0, 0, 1, torch.device("cpu"))
    model = build_model(planned, args.model, {"zero_optimization": {"stage": 0}}, torch.float32, 0, ranks)
    return SimpleNamespace(
        model=model, export=export_plan(model, planned, args.model, planned.tower.image_options(args))
    )


def killed(run) -> None:
    """Run something in another process, which has to be killed there."""
    if (child := os.fork()) == 0:
        try:
            run()
        finally:
            os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL


def die(*_: object, **__: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def left(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


@pytest.mark.parametrize("moment", ["write_folder", "_open_with_transformers"])
@pytest.mark.parametrize("dry_run", [False, True])
def test_a_trial_that_was_killed_is_removed_by_the_next(tmp_path, plan, monkeypatch, moment, dry_run):
    with monkeypatch.context() as patch:
        patch.setattr(trial, moment, die)
        killed(lambda: trial.try_export(plan.export, tmp_path, dry_run=dry_run))
    (name,) = left(tmp_path)
    assert name.startswith(trial.TRIAL)
    assert trial.try_export(plan.export, tmp_path, dry_run=dry_run)
    assert left(tmp_path) == []


def test_an_export_that_was_killed_is_removed_by_the_next(tmp_path, monkeypatch):
    def write() -> None:
        with staged(tmp_path) as stage:
            (stage / "config.json").write_text("{}")

    with monkeypatch.context() as patch:
        patch.setattr(output_folder, "_replace", die)
        killed(write)
    (name,) = left(tmp_path)
    assert name.startswith(".export-")
    write()
    assert left(tmp_path) == ["config.json"]
