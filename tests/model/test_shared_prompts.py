"""Answers that share their prompt have the losses and gradients of answers that each have their own."""

import dataclasses
import random

import pytest
import random_samples
import torch
import toys
from packed_step import Tower
from transformers import AutoModelForCausalLM

from llava_ds.constants import IGNORE_INDEX, IMAGE_TOKEN_INDEX
from llava_ds.data.collate import LoadedPair, LoadedSample, collate, counts_of
from llava_ds.data.loaded_pairs import common_prompt
from llava_ds.geometry import media_layout
from llava_ds.model import attention
from llava_ds.model.heads import LogProbs, SummedLoss
from llava_ds.model.llava import LlavaModel
from llava_ds.model.open.value_head import ValueHead, Values, answer_ends
from llava_ds.model.projector import build_projector

OPTIONS = random_samples.SQUARE
# Of each group: tokens of the prompt, its images, and tokens of the answers; on both sides of the toys' windows.
GROUPS = [(40, 1, (3, 1, 21, 9)), (1, 0, (4, 4)), (12, 2, (5,)), (60, 0, (1, 1, 30)), (7, 0, (2, 40, 1))]
SHORT = ("llama", "qwen3", "mistral")
PLAIN = [family for family in toys.FAMILIES if family not in toys.MIXTURES]


def samples_of(groups: list[tuple[int, int, tuple[int, ...]]], seed: int = 0) -> list[LoadedSample]:
    """Answers, with their prompts marked as shared."""
    rng, found = random.Random(seed), []

    def text(length: int) -> list[int]:
        return [rng.randrange(3, 400) for _ in range(length)]

    for length, images, answers in groups:
        layout = media_layout("image", ((9, 5),), images, OPTIONS)
        pixels = [torch.full((1, 3, 4, 4), rng.randrange(1, 200), dtype=torch.uint8) for _ in range(images)]
        shown = [IMAGE_TOKEN_INDEX] * layout.num_tokens * images
        ids = [*text(2), *shown, *text(length - 2 - len(shown))] if images else text(length)
        prompt, media = torch.tensor(ids), [(one, layout) for one in pixels]
        for i, size in enumerate(answers):
            answer = torch.tensor(text(size))
            labels = torch.cat([torch.full_like(prompt, IGNORE_INDEX), answer])
            labels[len(prompt) + 1 : -1 : 3] = IGNORE_INDEX  # tokens of an environment, for instance
            found.append(LoadedSample(torch.cat([prompt, answer]), labels, media, shared=len(prompt) if i else 0))
    return found


class ByColour(Tower):
    """Features that depend on the image."""

    def forward(self, pixel_values: torch.Tensor, inputs: dict | None = None) -> torch.Tensor:
        colours = pixel_values.double().mean((1, 2, 3)).sin()[:, None, None]
        return (colours * torch.arange(1, 33).view(1, 4, 8) / 8).to(torch.get_default_dtype())


def model_of(family: str, short: bool) -> LlavaModel:
    torch.manual_seed(0)
    config = toys.language_model_config(family)
    language_model = AutoModelForCausalLM.from_config(config, attn_implementation=attention.register())
    projector, head = build_projector("linear", 8, config.hidden_size), ValueHead(config.hidden_size)
    torch.nn.init.normal_(head.weight)
    model = LlavaModel(ByColour(), projector, language_model, None, head).train()
    if short:
        model.shorten_last_layer()
    return model


HEADS = {
    "loss": lambda batch: SummedLoss(),
    "log-probabilities": lambda batch: LogProbs(0.7),
    "values": lambda batch: Values(),
    "values of answers": lambda batch: Values(answer_ends(batch)),
}


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize(
    "family, short", [*((family, False) for family in PLAIN), *((family, True) for family in SHORT)]
)
def test_losses_and_gradients(family, short, head):
    shared = samples_of(GROUPS)
    plain = [dataclasses.replace(one, shared=0) for one in shared]
    model, found = model_of(family, short), {}
    for name, samples in (("shared", shared), ("plain", plain)):
        batch = collate(samples, OPTIONS)
        model.zero_grad()
        rows = model(batch, HEADS[head](batch))
        weights = torch.randn(rows.shape, generator=torch.Generator().manual_seed(1))
        (rows * weights).sum().backward()
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        found[name] = rows.detach(), gradients, batch
    (rows, gradients, packed), (expected, wanted, unpacked) = found["shared"], found["plain"]
    assert packed.input_ids.shape[1] == sum(n + sum(answers) for n, _, answers in GROUPS) < unpacked.input_ids.shape[1]
    torch.testing.assert_close(rows, expected, rtol=1e-5, atol=1e-5)
    assert gradients.keys() == wanted.keys()
    largest = max(gradient.abs().max().item() for gradient in wanted.values())
    for name, gradient in wanted.items():  # some are zero but for rounding
        close = 1e-5 * max(gradient.abs().max().item(), 0.01 * largest)
        torch.testing.assert_close(gradients[name], gradient, rtol=0, atol=close, msg=name)


def test_counts_are_those_of_the_computation():
    for samples in (samples_of(GROUPS), [dataclasses.replace(one, shared=0) for one in samples_of(GROUPS)]):
        batch, counts = collate(samples, OPTIONS), [counts_of(one) for one in samples]
        assert sum(each.tokens for each in counts) == batch.input_ids.shape[1]
        queries = batch.cu_seqlens.diff()
        keys = queries if batch.shared is None else batch.shared.cu_keys.diff()
        assert sum(each.pairs for each in counts) == int((queries * keys - queries * (queries - 1) // 2).sum())
        assert sum(each.targets for each in counts) == len(batch.targets)


@pytest.mark.parametrize(
    "change, expected",
    [
        ({}, 40),
        ({"labels": 39}, 39),  # a turn that is learned
        ({"ids": 20}, 20),
        ({"ids": 1}, 0),  # before the images
        ({"media": None}, 0),
    ],
)
def test_a_prompt_is_common_up_to_the_first_difference_behind_its_images(change, expected):
    first, other = samples_of([(40, 1, (3, 2))])
    ids, labels, media = other.input_ids.clone(), other.labels.clone(), other.media
    if "labels" in change:
        labels[39] = ids[39]
    elif "ids" in change:
        ids[change["ids"]] += 400
    elif change:
        media = [(tiles.clone(), layout) for tiles, layout in media]
    assert common_prompt(first, LoadedSample(ids, labels, media)) == expected


def test_an_answer_keeps_a_token_of_its_own():
    one, _ = samples_of([(6, 0, (2, 2))])
    unsupervised = dataclasses.replace(one, labels=torch.full_like(one.labels, IGNORE_INDEX))
    assert common_prompt(unsupervised, unsupervised) == len(one.input_ids) - 1
    pair = LoadedPair(unsupervised, dataclasses.replace(unsupervised, shared=len(one.input_ids) - 1))
    assert collate(list(pair.samples), OPTIONS).shared.own == (len(one.input_ids), 1)
