"""The order of the hooks is the policy: what a stop, a problem and a spike of the loss do to evaluation and saving."""

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fake_run import FakeSession, FakeWatch, end_of

from llava_ds.constants import DataError
from llava_ds.runtime.ranks import Ranks
from llava_ds.train import hooks, loop
from llava_ds.train.evaluating.evals import Evaluate
from llava_ds.train.hooks import Health, Hook, Log, Save, StepEnd, Stop
from llava_ds.train.loop import train


def run(session: FakeSession, step: int, monkeypatch, **watches: FakeWatch) -> StepEnd:
    monkeypatch.setattr(hooks, "settle_skipped_steps", lambda engine: None)
    health = Health.__new__(Health)
    health.session, health.training = session, session.plan.args.training
    for name in ("skipped", "skipped_steps"):
        setattr(health, name, watches.get(name, FakeWatch()))
    end = end_of(step)
    for hook in (Stop(session), health, Evaluate(session), Save(session)):
        hook.after_step(end)
    return end


@pytest.mark.parametrize(
    ("step", "done"), [(1, []), (2, ["evaluate"]), (4, ["evaluate", "save"]), (10, ["evaluate", "save"])]
)
def test_what_is_due_is_done_and_its_time_is_not_a_steps(step, done, monkeypatch):
    session = FakeSession()
    end = run(session, step, monkeypatch)
    assert session.done == done and end.paused == bool(done) and (end.paused_s() > 0) == bool(done)
    end.raise_problems()


def test_an_evaluation_that_ends_the_run_makes_its_step_the_last(monkeypatch):
    session = FakeSession()
    session.ends_at = 2
    end = run(session, 2, monkeypatch)
    assert session.done == ["evaluate", "save"] and end.finished and session.state.is_over and not session.state.stops


def test_a_request_to_stop_saves_at_any_step_and_does_not_evaluate(monkeypatch):
    session = FakeSession(stops=True)
    end = run(session, 2, monkeypatch)
    assert session.done == ["save"] and end.last and session.state.stops


def test_without_checkpoints_a_request_to_stop_saves_nothing(monkeypatch):
    session = FakeSession(stops=True, save_strategy="no")
    assert run(session, 3, monkeypatch).last and session.done == []


def test_a_run_whose_weights_are_the_last_checkpoints_ends_without_another(monkeypatch):
    session = FakeSession()
    end = run(session, 4, monkeypatch, skipped_steps=FakeWatch("too many"))
    assert session.done == [] and end.last
    with pytest.raises(DataError, match="too many"):
        end.raise_problems()


def test_too_many_broken_samples_save_before_the_run_ends(monkeypatch):
    session = FakeSession()
    end = run(session, 3, monkeypatch, skipped=FakeWatch("too many"))
    assert session.done == ["save"]
    with pytest.raises(DataError, match="too many"):
        end.raise_problems()


def test_a_failed_save_is_a_problem(monkeypatch):
    session = FakeSession()
    session.saver.after_step = lambda *args, **more: "the disk is full"
    with pytest.raises(DataError, match="the disk is full"):
        run(session, 4, monkeypatch).raise_problems()


@pytest.mark.parametrize(
    ("device", "rewinds", "late"), [("cpu", False, False), ("cuda", False, True), ("cuda", True, False)]
)
def test_the_log_on_a_gpu_is_read_late(monkeypatch, device, rewinds, late):
    session = FakeSession()
    session.ranks, session.mesh, session.trackers = Ranks(0, 0, 1, torch.device(device)), None, None
    session.plan.args.rewinds = rewinds
    session.plan.resolved = SimpleNamespace(compute_dtype=torch.float32, zero_stage=0)
    session.plan.output_dir = session.plan.run_folder = Path()
    session.plan.flops = session.plan.resumed_step = None
    session.objective = SimpleNamespace(num_units=None)
    monkeypatch.setattr(hooks, "peak_flops", lambda *_: (1.0, ""))
    monkeypatch.setattr(hooks, "called", lambda args: "a run")
    monkeypatch.setattr(hooks, "Progress", lambda run, *_: run)
    assert Log(session).progress.reads_late == late


def test_an_error_that_ends_the_run_leaves_a_whole_log(monkeypatch):
    """Where the log follows a step behind, a checkpoint may already have the last one."""
    done = []

    class Fails(Hook):
        def after_step(self, end: StepEnd) -> None:
            end.problems.append("the disk is full")

        def flush(self) -> None:
            done.append("flush")

    session = FakeSession()
    session.memory, session.mesh = nullcontext(), SimpleNamespace(dp_rank=0)
    session.stop.training = lambda limit, ranks: nullcontext()
    session.plan.args.data = SimpleNamespace(dataloader_num_workers=0)
    session.plan.args.training.max_run_time = session.objective = None
    monkeypatch.setattr(loop, "run_steps", lambda *given: given[-1](end_of(3).result))
    with pytest.raises(DataError, match="the disk is full"):
        train(session, [Fails(session)])
    assert done == ["flush"]


def test_the_report_is_left_after_the_files_that_it_shows(tmp_path, capsys):
    session, order = FakeSession(), []
    session.state.step, session.memory, session.mesh = 10, nullcontext(), SimpleNamespace(dp_rank=0)
    session.engine = SimpleNamespace(train=lambda: None, device=torch.device("cpu"))
    session.runner = SimpleNamespace(engine=session.engine)
    session.stop.training = lambda limit, ranks: nullcontext()
    session.plan.output_dir, session.plan.args.data = tmp_path, SimpleNamespace(dataloader_num_workers=0)
    session.plan.args.training.max_run_time = session.objective = None
    session.plan.steps.dataset = SimpleNamespace(is_whole=True)

    def write(rows: list) -> None:
        order.append((tmp_path / "report.html").exists())

    log, health = Log.__new__(Log), Health.__new__(Health)
    log.session = health.session = session
    log.progress = SimpleNamespace(close=lambda: None)
    health.skipped = health.skipped_steps = FakeWatch()
    health.skipped.log.write = write
    (tmp_path / "metrics.jsonl").write_text("")
    for hook in (log, health):
        hook.begin = lambda: None
    train(session, [log, health])
    assert order == [False] * 2 and f"report: {tmp_path / 'report.html'}" in capsys.readouterr().out
