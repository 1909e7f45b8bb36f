"""The factors of the micro-batches' losses add up to the mean that was asked for, whatever the ranks really have."""

import dataclasses
from types import SimpleNamespace

import packed_step
import pytest
import torch
import torch.nn.functional as F
import toys
from random_samples import SQUARE, sample
from transformers import AutoModelForCausalLM

from llava_ds.data.collate import LoadedSample, collate, counts_of
from llava_ds.data.loader import Counts
from llava_ds.model import attention
from llava_ds.model.llava import LlavaModel
from llava_ds.model.projector import build_projector
from llava_ds.train.objectives.objective import SFT


def windows(targets: list[list[int]]):
    """A window per rank with micro-batches of so many supervised tokens, and the counts of all."""
    every = [[SimpleNamespace(num_targets=n) for n in rank] for rank in targets]
    flat = [n for rank in targets for n in rank]
    counts = torch.tensor([len(flat), 100, sum(flat), sum(n > 0 for n in flat), 900, 3], dtype=torch.float64)
    return [SimpleNamespace(micro_batches=micros) for micros in every], counts


@pytest.mark.parametrize("targets", [[[10, 5]], [[10, 5], [3, 2]], [[10, 0], [3, 2]], [[10, 0], [0, 0]]])
@pytest.mark.parametrize("reduction", ["token", "micro_batch"])
def test_the_gradient_is_the_mean_over_all_ranks(targets, reduction):
    """Every token's loss is 1, so the mean is; DeepSpeed divides by the ranks. A micro-batch without any counts not."""
    made, counts = windows(targets)
    total = 0.0
    for window, own in zip(made, targets):
        scales = SFT(reduction, grad_ranks=len(targets)).scales(window, counts)
        assert all(scale.dtype == torch.float64 and scale.ndim == 0 for scale in scales)
        total += sum(n * scale.item() for n, scale in zip(own, scales)) / len(targets)
    assert total == pytest.approx(1.0, rel=1e-12)


@pytest.mark.parametrize("reduction", ["token", "micro_batch"])
def test_a_step_without_any_token_is_finite(reduction):
    made, counts = windows([[0, 0], [0]])
    scales = [scale for window in made for scale in SFT(reduction, grad_ranks=2).scales(window, counts)]
    assert torch.isfinite(torch.stack(scales)).all()


def conversations(weights: list[list[float]]) -> list[LoadedSample]:
    """Samples of three questions and answers of different lengths; an answer's weight may be None."""
    generator, made = torch.Generator().manual_seed(2), []
    for turns in weights:
        ids, labels, values = [1], [-100], [1.0]
        for i, weight in enumerate(turns):
            question, answer = (torch.randint(3, 400, (n,), generator=generator).tolist() for n in (4 + i, 7 - 2 * i))
            ids += question + answer
            labels += [-100] * len(question) + answer
            values += [1.0] * len(question) + [1.0 if weight is None else weight] * len(answer)
        one = dataclasses.replace(sample(ids), labels=torch.tensor(labels))
        weighed = any(weight is not None for weight in turns)
        made.append(dataclasses.replace(one, weights=torch.tensor(values)) if weighed else one)
    return made


@pytest.mark.parametrize("reduction", ["token", "micro_batch"])
@pytest.mark.parametrize("short", [False, True])
def test_the_packed_step_is_the_sum_of_weights_times_losses_by_the_number_of_tokens(reduction, short):
    """Against transformers' own model, one sample at a time and without a pack."""
    weights = [[0.5, None, 2.0], [None, None], [0.25, 0.25], [1.5]]
    samples, config = conversations(weights), toys.language_model_config()
    torch.manual_seed(0)
    text = AutoModelForCausalLM.from_config(config, attn_implementation=attention.register())
    model = LlavaModel(packed_step.Tower(), build_projector("linear", 8, config.hidden_size), text).train()
    if short:
        model.shorten_last_layer()
    plain = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    plain.load_state_dict(text.state_dict())

    packs = [samples[:3], samples[3:]]
    numbers = [sum(counts_of(one).targets for one in pack) for pack in packs]
    counts = torch.tensor(Counts(4, 100, sum(numbers), 2, 900, 3), dtype=torch.float64)
    window = SimpleNamespace(micro_batches=[SimpleNamespace(num_targets=n) for n in numbers])
    objective = SFT(reduction, grad_ranks=1)
    total = 0.0
    for pack, scale in zip(packs, objective.scales(window, counts)):
        batch = collate(pack, SQUARE)
        batch = dataclasses.replace(batch, pixel_values=torch.zeros(1, 3, 2, 2, dtype=torch.uint8))
        micro = objective.forward(model, batch)
        assert micro.by_source[1].sum() == len(batch.targets)  # a token counts as one, whatever its weight
        (micro.loss_sum * scale.float()).backward()
        total += (micro.by_source[0].sum() * scale).item()

    wanted = 0.0
    for pack, number in zip(packs, numbers):
        divisor = sum(numbers) if reduction == "token" else 2 * number
        for one in pack:
            logits = plain(one.input_ids[None]).logits[0, :-1].double()
            losses = F.cross_entropy(logits, one.labels[1:], reduction="none", ignore_index=-100)
            own = one.weights[1:] if one.weights is not None else torch.ones(len(losses))
            wanted = wanted + (losses * own).sum() / divisor
    wanted.backward()
    assert total == pytest.approx(wanted.item(), rel=1e-6)
    for (name, found), reference in zip(text.named_parameters(), plain.parameters()):
        assert (found.grad - reference.grad).abs().max() < 1e-6, name
