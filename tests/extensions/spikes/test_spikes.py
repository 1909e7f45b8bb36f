"""What a spike does to evaluation and saving, when it is met, and what it does not go with."""

from types import SimpleNamespace

import pytest
import torch
from ds_json import CONFIGS, arguments
from fake_run import FakeSession, FakeWatch, end_of

from llava_ds.config.parsing import parse_arguments
from llava_ds.constants import ConfigError, DataError
from llava_ds.extensions.active import active
from llava_ds.extensions.base import StepEnd
from llava_ds.extensions.spikes import extension
from llava_ds.extensions.spikes.extension import Spikes
from llava_ds.runtime.ranks import Ranks
from llava_ds.train import hooks
from llava_ds.train.evaluating.evals import Evaluate
from llava_ds.train.hooks import Save, Stop

REWIND = ["--output_dir", "out", "--deepspeed_config", str(CONFIGS / "zero2.json"), "--on_loss_spike", "rewind"]


def run(session: FakeSession, step: int, monkeypatch, spikes: FakeWatch) -> StepEnd:
    for module in (hooks, extension):
        monkeypatch.setattr(module, "settle_skipped_steps", lambda engine: None)
    hook = Spikes.__new__(Spikes)
    hook.session, hook.training, hook.spikes = session, session.plan.args.training, spikes
    end = end_of(step)
    for each in (Stop(session), hook, Evaluate(session), Save(session)):
        each.after_step(end)
    return end


def test_a_spike_goes_back_before_anything_is_evaluated_or_saved(monkeypatch, capsys):
    session, spikes = FakeSession(), FakeWatch(found=("one",), rewinds=True)
    end = run(session, 4, monkeypatch, spikes)
    assert session.done == ["rewind", "evaluate", "save"] and end.paused
    assert spikes.settled == ["checkpoint-4"] and "back to checkpoint-4" in capsys.readouterr().out


def test_a_run_that_went_back_too_often_ends_without_another_checkpoint(monkeypatch):
    session = FakeSession()
    end = run(session, 4, monkeypatch, FakeWatch("too many"))
    assert session.done == [] and end.last
    with pytest.raises(DataError, match="too many"):
        end.raise_problems()


@pytest.mark.parametrize(("device", "rewinds", "step"), [("cpu", False, 4), ("cuda", False, 5), ("cuda", True, 4)])
def test_on_a_gpu_a_spike_is_met_when_its_step_is_read_which_is_a_step_later(monkeypatch, device, rewinds, step):
    for at in range(4, 9):
        session, spikes = FakeSession(save_strategy="no"), FakeWatch(found=("one",))
        session.ranks = Ranks(0, 0, 1, torch.device(device))
        session.plan.args.training.logging_steps, session.plan.args.rewinds = 4, rewinds
        run(session, at, monkeypatch, spikes)
        assert spikes.settled == [None] * (at in (step, step + 4))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--save_strategy", "no"], "--on_loss_spike rewind needs checkpoints: give --save_strategy steps"),
        (["--save_only_model", "True"], "--save_only_model True and --on_loss_spike rewind: --on_loss_spike goes with"),
        (["--loss_spike_window", "3"], "--loss_spike_window is 3: give 4 or more"),
        (["--loss_spike_sigma", "0"], "--loss_spike_sigma is 0.0: give a value above 0"),
    ],
)
def test_what_a_rewind_does_not_go_with_is_refused(flags, message):
    with pytest.raises(ConfigError) as refused:
        parse_arguments([*REWIND, *flags])
    assert message in str(refused.value)


def test_an_optimizer_on_nvme_can_not_go_back():
    config = {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme"}}}
    active(["spikes"]).check(SimpleNamespace(config=config, args=arguments()))
    with pytest.raises(ConfigError, match="--on_loss_spike rewind can't go back"):
        active(["spikes"]).check(SimpleNamespace(config=config, args=arguments(on_loss_spike="rewind")))


def test_a_run_that_may_go_back_compares_what_decides_when_it_does():
    assert arguments(on_loss_spike="rewind").rewinds and not arguments().rewinds
