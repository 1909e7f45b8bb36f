"""A sample's loss that depends on other samples of its pack is found, however little it does."""

import re
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
import toys
from test_layouts import OPTIONS, ByColour, samples_of
from transformers import AutoModelForCausalLM

from llava_ds.data.collate import collate
from llava_ds.extensions.plugins.hidden_loss import HiddenLoss
from llava_ds.extensions.plugins.isolation import Isolation, Owners, watching
from llava_ds.extensions.plugins.proof import Trial
from llava_ds.model import attention
from llava_ds.model.llava import LlavaModel
from llava_ds.model.projector import build_projector
from llava_ds.train.objectives.objective import SFT, Wrapped

LENGTHS = (14, 30, 15, 31, 9)


@pytest.fixture
def model() -> LlavaModel:
    torch.manual_seed(0)
    config = toys.language_model_config("llama")
    language_model = AutoModelForCausalLM.from_config(config, attn_implementation=attention.register())
    model = LlavaModel(ByColour(), build_projector("linear", 8, config.hidden_size), language_model).train()
    model.add_module("own_idea", torch.nn.Linear(config.hidden_size, 1))
    model.shorten_last_layer()
    return model


def leak(model: LlavaModel, objective) -> str | None:
    samples = samples_of(LENGTHS)
    pack, *alone = (collate(each, OPTIONS) for each in (samples, *([one] for one in samples)))
    owners = Owners.of(pack, alone)
    assert owners.tokens.bincount().tolist() == [*LENGTHS] and owners.tiles.tolist() == [0, 1, 2, 3]

    def numbers(micro) -> dict[str, float]:
        return {name: float(each.detach()) for name, each in {"loss": micro.loss_sum, **micro.metrics}.items()}

    def run(batch) -> tuple[dict, dict]:
        with watching(model, batch) as gradients:
            micro = objective.forward(model, batch)
            micro.loss_sum.backward()
        return numbers(micro), gradients

    @torch.no_grad()
    def values(batch) -> dict[str, float]:
        return numbers(objective.forward(model, batch))

    return Isolation(model, pack, owners, run, values).leak([values(each) for each in alone], 1e-4)


def hidden_loss(values, at=lambda batch: batch.target_positions, weight: float = 1e-3):
    """A small further loss. values: of each position, from the head's outputs (n,) and the batch."""

    def own(model, hidden, batch):
        return values(model.own_idea(hidden)[:, 0], batch)

    return HiddenLoss(SFT(grad_ranks=1), "idea", weight, at, own)


def of_images(batch):
    return batch.placing.positions


GRADIENT = r"^the loss of sample 1 of 5 in one pack has a gradient at the token embeddings of sample [23]"
CHANGED = r"^idea of sample 1 of 5 in one pack is [-.e0-9]+, but [-.e0-9]+ after a change of the other samples$"
LEAKS = {
    "mean of images": (lambda v, _: v.mean().expand(len(v)), of_images, GRADIENT),
    "mean": (lambda v, _: v - v.mean(), None, GRADIENT),
    "largest": (lambda v, _: v * 0 + v.max(), None, CHANGED),
    "batch norm": (lambda v, _: (v - v.mean()) / v.std() + 2 * v, None, GRADIENT),
    "neighbour": (lambda v, _: torch.cat([v[:-1], v[:1]]), None, r"^idea of sample 1 of 5 .* alone$"),
    "detached mean": (lambda v, _: v * v.detach().mean(), None, CHANGED),
    "subtracted": (lambda v, _: v - v.detach().mean(), None, CHANGED),
    "norm of images": (lambda v, _: v / v.detach().norm(), of_images, CHANGED),
    "colours": (lambda v, batch: v * (1 + batch.pixel_values.double().mean()), None, CHANGED),
    "number of samples": (lambda v, batch: v * len(batch.lengths), None, r"^idea of sample 1 of 5 .* alone$"),
}


@pytest.mark.parametrize("name", LEAKS)
def test_a_loss_that_reads_other_samples_is_found(model, name):
    values, at, said = LEAKS[name]
    found = leak(model, hidden_loss(values, at or (lambda batch: batch.target_positions)))
    assert re.search(said, found or ""), found


class Begins:
    """Changes of the language model's inputs, in place of its begin()."""

    @staticmethod
    def centred(embeds):
        return embeds - 1e-3 * embeds.mean(1, keepdim=True)

    @staticmethod
    def scaled(embeds):
        return embeds * (1 + embeds.detach().std())

    @staticmethod
    def doubled(embeds):
        return embeds.mul_(2)  # in place


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("centred", "the loss of sample 1 of 5 in one pack has a gradient at the token embeddings of sample 2"),
        ("scaled", "loss of sample 1 of 5 in one pack is "),
        ("doubled", None),
    ],
)
def test_inputs_that_mix_samples_are_found(model, name, said):
    plain = model.begin
    model.begin = lambda batch: (getattr(Begins, name)(plain(batch)[0]), plain(batch)[1])
    found = leak(model, SFT(grad_ranks=1))
    assert found is None if said is None else found.startswith(said)


def test_a_projector_that_mixes_images_is_found(model):
    projector = model.projector.forward
    model.projector.forward = lambda features: projector(features - 0.01 * features.mean(0, keepdim=True))
    assert "has a gradient at the image features of sample 2" in leak(model, SFT(grad_ranks=1))


@dataclass(frozen=True)
class BySample(Wrapped):
    """A further loss of every sample, whatever its targets: of the number of its tokens, and of its first embedding."""

    mixes: bool

    def forward(self, engine, batch):
        micro = self.objective.forward(engine, batch)
        rows = engine.language_model.get_input_embeddings()(batch.input_ids)[0]
        firsts = rows.index_select(0, batch.cu_seqlens[:-1].long()).pow(2).sum(1)  # (samples,)
        own = firsts.sum() + (micro.loss_sum * firsts.detach().mean() if self.mixes else 0)
        metrics = {"tokens": batch.cu_seqlens[-1].double(), "firsts": firsts.detach().sum()}
        return micro._replace(loss_sum=micro.loss_sum + own, metrics=metrics)


def test_losses_that_keep_to_their_samples_are_not_found(model):
    assert leak(model, SFT(grad_ranks=1)) is None
    for at in (of_images, lambda batch: batch.target_positions):
        assert leak(model, hidden_loss(lambda v, batch: v**2 + batch.input_ids.shape[0], at)) is None
    assert leak(model, BySample(SFT(grad_ranks=1), False)) is None  # counts without targets as well
    assert leak(model, BySample(SFT(grad_ranks=1), True)).startswith("loss of sample 1 of 5 in one pack is")


def test_samples_that_are_not_end_to_end_are_not_compared():
    one, other = (collate([sample], OPTIONS) for sample in samples_of(LENGTHS[:2]))
    assert Owners.of(collate(samples_of(LENGTHS[:2]), OPTIONS), [other, one]) is None
    text = collate(samples_of(LENGTHS)[4:], OPTIONS)
    assert Owners.of(text, [text]).tiles.tolist() == [-1]


def test_a_second_pass_leaves_the_runs_random_numbers_alone():
    trial = SimpleNamespace(
        ranks=SimpleNamespace(device=torch.device("cpu")), batches=[None], _run=lambda _: torch.rand(3)
    )
    before = torch.get_rng_state()
    drawn = Trial._again(trial)
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.equal(drawn, torch.rand(3))
