"""Drawing and judging answers over fake CUDA tensors: the host waits where the watchdog is told so."""

import numpy as np
import pytest
import torch
import toys
from fake_gpu import CUDA, gpu
from fake_models import arguments, built, sample, tower_plan

from llava_ds.runtime.mesh import Mesh
from llava_ds.second_models.frozen import Scorer
from llava_ds.train.evaluating import sampling
from llava_ds.train.evaluating.sampling import DrawRules, draw_answers
from llava_ds.train.evaluating.twin import make_twin

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("one_rank")]

OPTIONS = toys.image_options()
SAMPLES = [sample(OPTIONS, 9, [("image", ((40, 30),))]), sample(OPTIONS, 30)]


def model_on(rules, value_head: bool = False):
    args = arguments()
    with rules.building():
        return built(toys.language_model_config(), tower_plan("clip", args), args, value_head=value_head).eval()


@pytest.mark.parametrize("more", [{}, {"temperature": 0.7, "top_k": 9, "top_p": 0.9}])
def test_the_first_token_of_every_answer(monkeypatch, more):
    """One, because how many answers go on after it is a value. All that are read are zeros, also whose token it is."""
    monkeypatch.setattr(sampling, "_answer", lambda drawn, ends: drawn)
    rules_of_drawing = DrawRules(4, 1, 512, (2,), OPTIONS, **more)
    with gpu() as rules:
        model = make_twin(model_on(rules))
        numbers = [np.zeros((4, 1))] * len(SAMPLES)
        answers = draw_answers(model, SAMPLES, numbers, rules_of_drawing)
        assert set(rules.waits) == {"the copy of the prompts to the device", "the next token"}
    assert [len(each) for each in answers] == [4, 4] and answers[0][0] == [(0, 0.0, 0.0)] * 8


@pytest.mark.parametrize("value_head", [True, False])
def test_scores_of_answers(value_head):
    with gpu() as rules:
        judge = object.__new__(Scorer)
        judge._model, judge._images, judge._device = model_on(rules, value_head), OPTIONS, CUDA
        assert judge.scores(SAMPLES) == [0.0, 0.0]
        assert set(rules.waits) == {"the scores of answers"}


def test_moments_of_values():
    batches = pytest.importorskip("llava_ds.extensions.rl.policy_batches")
    values = pytest.importorskip("llava_ds.extensions.rl.value_batches")
    with gpu() as rules:
        ones = torch.ones(5, dtype=torch.float64, device=CUDA)
        values.moments([ones, ones], ones / 5, batches.StepTotals(1, 1, 5, 1.0), Mesh(dp=1, dp_rank=0))
        assert set(rules.waits) == {"the critic's values", "sums over the answers of a step"}
