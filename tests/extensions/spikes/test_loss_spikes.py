"""loss_spikes.jsonl: a loss far above those before it is found, also by a run that was broken off before."""

from pathlib import Path
from types import SimpleNamespace

import torch

from llava_ds.data.step_plan import StepLayout
from llava_ds.extensions.spikes.extension import LossSpikes
from llava_ds.extensions.spikes.flags import Flags
from llava_ds.files.jsonl import MetricsLog, read_metrics
from llava_ds.runtime.ranks import Ranks

ALONE = Ranks(0, 0, 1, torch.device("cpu"))
DATASET = SimpleNamespace(
    lengths=[9] * 2, rows=[1, 0], row=lambda index: {"id": f"id{index}"}, wait_for=lambda samples: None
)
PLAN = SimpleNamespace(dataset=DATASET, step=lambda step: StepLayout([], [[[(step - 1) % 2]]]))
CALM = [2.0, 2.1, 1.9, 2.05]


def spikes_in(folder: Path, resume_step: int = 0, sigma: float = 4.0, window: int = 8) -> LossSpikes:
    flags = Flags(on_loss_spike="rewind", loss_spike_sigma=sigma, loss_spike_window=window)
    return LossSpikes(folder, PLAN, flags, resume_step, ALONE)


def give(spikes: LossSpikes, losses: list[float], first: int = 1, rewound_to: str | None = None) -> list[int]:
    """The steps that are found to be spikes, each settled when it is."""
    found = []
    log = MetricsLog(spikes.path.with_name("metrics.jsonl"), first - 1)
    for step, loss in enumerate(losses, first):
        log.write([{"step": step, "loss": loss}])
        spikes.add([SimpleNamespace(step=step, loss=loss)])
        if spikes.found:
            found += [row["step"] for row in spikes.found]
            spikes.settle(rewound_to)
    return found


def test_a_spike_is_found_and_its_samples_are_written_down(tmp_path):
    spikes = spikes_in(tmp_path)
    assert give(spikes, [*CALM, 2.2, 4.0, 2.0], rewound_to="checkpoint-3") == [6]
    (row,) = read_metrics(tmp_path / "loss_spikes.jsonl")
    assert (row["step"], row["loss"], row["samples"], row["rewound_to"]) == (6, 4.0, ["id0"], "checkpoint-3")
    assert abs(row["mean"] - sum([*CALM, 2.2]) / 5) < 1e-12


def test_nothing_is_judged_before_half_a_window_and_losses_that_are_not_finite_never_are(tmp_path):
    assert give(spikes_in(tmp_path), [2.0, 2.1, 1.9, 9.0]) == []
    assert give(spikes_in(tmp_path), [*CALM, float("nan"), float("inf"), 2.0, 9.0]) == [8]


def test_spikes_are_no_part_of_what_the_next_are_judged_by_until_they_are_all_there_is(tmp_path):
    assert give(spikes_in(tmp_path), [*CALM, 2.0, *[9.0] * 12]) == [6, 7, 8, 9, 10]  # then it is how things are


def test_losses_that_hardly_differ_have_no_spikes_in_their_last_digits(tmp_path):
    assert give(spikes_in(tmp_path), [2.0, 2.0, 2.0, 2.0, 2.001, 2.05]) == []


def test_a_mixture_of_easy_and_hard_steps_has_no_spikes(tmp_path):
    assert give(spikes_in(tmp_path), [1.0, 2.0, 1.1, 2.1, 0.9, 2.0, 1.0, 2.2]) == []


def test_a_resumed_run_judges_as_the_one_that_was_broken_off(tmp_path):
    losses = [*CALM, 2.0, 9.0, 9.0, 2.0, 2.1, 5.0, 9.5, 2.0, 2.1, 4.4]
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    whole.mkdir(), broken.mkdir()
    expected = give(spikes_in(whole), losses, rewound_to="a")
    for stopped in range(1, len(losses)):
        given = give(spikes_in(broken), losses, rewound_to="a")
        again = spikes_in(broken, resume_step=stopped)
        assert [*(step for step in given if step <= stopped), *give(again, losses[stopped:], stopped + 1, "a")] == (
            expected
        )
        assert read_metrics(broken / "loss_spikes.jsonl") == read_metrics(whole / "loss_spikes.jsonl")
        for path in broken.iterdir():
            path.unlink()


def test_going_back_to_the_same_checkpoint_over_and_over_is_a_problem(tmp_path):
    spikes = spikes_in(tmp_path, window=64)
    losses = [2.0, 2.1] * 20
    give(spikes, [*losses, 9.0, 2.0, 9.0], rewound_to="checkpoint-4")
    assert spikes.problem is None
    again = spikes_in(tmp_path, resume_step=43, window=64)  # a resume goes on counting
    give(again, [9.0], 44, "checkpoint-4")
    assert again.problem.startswith("the run went back to checkpoint-4 3 times")
    other = spikes_in(tmp_path, resume_step=43, window=64)
    give(other, [9.0], 44, "checkpoint-40")
    assert other.problem is None
