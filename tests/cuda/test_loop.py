"""The loop, eval and sample answers over fake CUDA tensors: the host waits only where the code says so."""

import importlib
from dataclasses import replace

import pytest
import torch
import toys
from daily import few
from fake_gpu import CUDA, HostWait, gpu
from fake_models import Engine, Samples, arguments, built, on_gpu, sample, tower_plan

from llava_ds.data.collate import LoadedPair
from llava_ds.data.loaded_pairs import common_prompt
from llava_ds.data.loader import Window
from llava_ds.data.step_plan import Packing
from llava_ds.engine.runner import Direct
from llava_ds.extensions.table import EXTENSIONS
from llava_ds.runtime.mesh import Mesh
from llava_ds.runtime.ranks import Ranks
from llava_ds.runtime.waiting import waiting
from llava_ds.tracking.progress import NumbersFromDevice
from llava_ds.train.evaluating.evals import eval_loss
from llava_ds.train.loop import run_steps
from llava_ds.train.objectives.objective import SFT
from llava_ds.train.state import TrainState

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("one_rank")]

OPTIONS = toys.image_options()
IMAGE = ("image", ((40, 30),))
MESH = Mesh(dp=1, dp_rank=0)
RANKS = Ranks(0, 0, 1, CUDA)
SAMPLES = [sample(OPTIONS, 9, [IMAGE]), sample(OPTIONS, 30), sample(OPTIONS, 14, [IMAGE] * 2, source=1)]


def pair(lengths: tuple[int, int], media: list, shares: bool) -> LoadedPair:
    chosen, rejected = (replace(sample(OPTIONS, n, media), extra={"reference": -1.5}) for n in lengths)
    rejected = replace(rejected, media=chosen.media)
    return LoadedPair(chosen, replace(rejected, shared=common_prompt(chosen, rejected) if shares else 0))


PAIRS = [pair((8, 12), [IMAGE], True), pair((5, 3), [], True), pair((4, 4), [], False)]
OBJECTIVES = {
    "sft": SFT(num_sources=2, grad_ranks=1),
    "sft by micro-batch": SFT("micro_batch", 2, grad_ranks=1),
}
if "preference" in EXTENSIONS:
    dpo = importlib.import_module("llava_ds.extensions.preference.dpo")
    KINDS = ("sigmoid", "hinge", "ipo", "simpo", "cpo", "orpo")
    OBJECTIVES |= {f"dpo {kind}": dpo.DPO(dpo.PairLoss(kind, rpo_alpha=1.0), 2, 1) for kind in KINDS}

SOME = [name for name in ("sft", "dpo sigmoid") if name in OBJECTIVES]


def engine_on(rules, **flags) -> Engine:
    args = arguments(**flags)
    with rules.building():
        return Engine(built(toys.language_model_config(), tower_plan("clip", args), args, short=True))


@pytest.mark.parametrize("name", few(OBJECTIVES, SOME))
def test_steps_wait_for_nothing_and_their_numbers_are_read_where_it_says_so(name):
    objective, items = OBJECTIVES[name], PAIRS if "dpo" in name else SAMPLES
    results = []
    with gpu() as rules:
        engine = engine_on(rules)
        window = Window(on_gpu(items, OPTIONS, [[0], [1]]), 2, 0.0)

        def after_step(result) -> float:
            results.append(result)
            return 0.0

        run_steps(Direct(engine), iter([window] * 3), TrainState(), 3, objective, MESH, after_step)
        assert not rules.waits and engine.calls == ["boundary False", "step", "boundary True", "step"] * 3
        tensors = [results[-1].loss, results[-1].by_source, results[-1].counts, *results[-1].metrics.values()]
        assert all(tensor.is_cuda and tensor.dtype == torch.float64 for tensor in tensors)
        with pytest.raises(HostWait):
            results[-1].loss.item()
        copied = NumbersFromDevice([{"loss": result.loss, "norm": result.grad_norm} for result in results], CUDA)
        assert not rules.waits
        with pytest.raises(HostWait):
            copied.read()
        with waiting("the numbers of a step"):
            copied.read()
        assert rules.waits == ["the numbers of a step"]


@pytest.mark.parametrize("name", SOME)
def test_eval_waits_for_its_sums(name):
    items = PAIRS if "dpo" in name else SAMPLES
    data = Samples(items, OPTIONS)
    data.sources, data.lengths, data.wait_for = ("a", "b"), [40] * len(items), lambda samples: None
    with gpu() as rules:
        engine = engine_on(rules)
        eval_loss(Direct(engine), data, Packing(1, 2, 1, None), 0, OBJECTIVES[name], MESH)
        assert set(rules.waits) == {"the eval loss"}


def test_sample_answers_wait_for_their_tokens(tokenizer):
    own = pytest.importorskip("llava_ds.extensions.samples.sampled_answers")
    prompts = [own.SampleQuestion(i, str(i), "?", [], "", one) for i, one in enumerate(SAMPLES)]
    with gpu() as rules:
        engine = engine_on(rules)
        own.answers(Direct(engine), prompts, own.Decoding(tokenizer, "plain", OPTIONS, 4, 512), RANKS)
        assert set(rules.waits) == {"the questions on their way to the device", "the next token"}


def test_sums_of_weights_are_read_where_it_says_so():
    replicas = pytest.importorskip("llava_ds.extensions.replicas.replicas")
    with gpu() as rules:
        engine = engine_on(rules)
        replicas.replica_sums(engine.module)
        assert set(rules.waits) == {"sums of the weights"}
