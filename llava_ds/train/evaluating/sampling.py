# B prompts, G answers to each, L tokens of the longest prompt, D language-model width, V vocabulary, R cached rows
"""Sample answers from a model. A prompt is computed once for all its answers, as are answers that are equal so far."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from transformers import LogitsProcessorList, TopKLogitsWarper, TopPLogitsWarper
from transformers.cache_utils import Cache, LinearAttentionLayer

from llava_ds.constants import IGNORE_INDEX, IMAGE_TOKEN_INDEX
from llava_ds.data.collate import LoadedSample, collate, padded_left
from llava_ds.data.dataset import BrokenSample, EncodedDataset
from llava_ds.data.end_markers import end_markers
from llava_ds.data.packing import plan_by_tokens
from llava_ds.data.step_plan import Packing
from llava_ds.geometry import ImageOptions
from llava_ds.model.families.language import final_logits
from llava_ds.model.llava import LlavaModel
from llava_ds.runtime.waiting import waiting

if TYPE_CHECKING:
    from llava_ds.extensions.base import ExtensionFlags
    from llava_ds.train.plan import Plan


@dataclass(frozen=True)
class Answer:
    """A sampled answer. ids: its token ids, including the end marker if it was reached; log_probs: their
    log-probabilities; entropy: sum over the ids of the distributions' entropies, in nats; ended: True if it has an end
    marker. As in training, log_probs and entropy depend on the temperature but not on top_k and top_p."""

    ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    entropy: float
    ended: bool


@dataclass(frozen=True)
class DrawRules:
    """Rules for sampling. num_answers: answers per prompt; max_length: limit of prompt plus answer in tokens; ends: ids
    of end markers; at_once: number of prompts computed together, None for all. The other fields are transformers'
    generation options; top_k 0 and top_p 1 allow all tokens."""

    num_answers: int
    max_new_tokens: int
    max_length: int
    ends: tuple[int, ...]
    images: ImageOptions
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    at_once: int | None = None

    @classmethod
    def of(cls, plan: "Plan", flags: "ExtensionFlags", **more: object) -> "DrawRules":
        """Make the rules from the flags of an extension that samples answers for training. more: remaining fields."""
        return cls(
            max_new_tokens=flags.max_completion_length,
            max_length=plan.args.data.model_max_length,
            ends=tuple(end_markers(plan.args.model.version, plan.model.tokenizer)),
            images=plan.images,
            temperature=flags.temperature,
            at_once=flags.per_device_generation_batch_size,
            **more,
        )

    def room(self, prompt: LoadedSample) -> int:
        """Return the maximum number of tokens for an answer to the prompt."""
        return min(self.max_new_tokens, self.max_length - len(prompt.input_ids))

    def prompt(
        self, dataset: EncodedDataset, index: int, sample: LoadedSample, begin: int
    ) -> LoadedSample | BrokenSample:
        """Return the part of a sample before the answer that starts at `begin`, with the images in this part.

        index: the sample's index in the data set. Returns a BrokenSample if no room is left for an answer.
        """
        ids = sample.input_ids[:begin]
        shown = int((ids == IMAGE_TOKEN_INDEX).sum())
        starts = itertools.accumulate((len(layout.rows) for _, layout in sample.media), initial=0)
        media = [one for one, start in zip(sample.media, starts) if start < shown]
        found = LoadedSample(ids, torch.full_like(ids, IGNORE_INDEX), media, sample.source)
        if len(ids) and self.room(found) > 0:
            return found
        return dataset.broken(index, "no room is left for an answer: raise --model_max_length")


def with_answer(asked: LoadedSample, answer: Sequence[int]) -> LoadedSample:
    """Append the ids of an answer to a prompt, as supervised tokens."""
    ids = torch.tensor(answer)
    labels = torch.cat([torch.full_like(asked.input_ids, IGNORE_INDEX), ids])
    return LoadedSample(torch.cat([asked.input_ids, ids]), labels, asked.media, asked.source)


def numbers_for(rules: DrawRules, seed: int, step: int, sample: int, attempt: int = 0) -> np.ndarray:
    """Return random numbers in [0, 1), (G, max_new_tokens), with which to sample the answers to a prompt in a step.

    They depend only on the arguments, so the number of ranks and a resume don't change them.
    """
    return np.random.default_rng([seed, step, sample, attempt]).random((rules.num_answers, rules.max_new_tokens))


def draw_answers(
    model: LlavaModel, prompts: list[LoadedSample], numbers: list[np.ndarray], rules: DrawRules
) -> list[list[Answer]]:
    """Sample num_answers answers to every prompt. Returns a list per prompt.

    model: a twin (make_twin) of the trained model, with gathered weights; numbers: numbers_for() of each prompt.
    """
    size = rules.at_once or max(1, len(prompts))
    parts = [slice(first, first + size) for first in range(0, len(prompts), size)]
    return [each for part in parts for each in _draw_together(model, prompts[part], numbers[part], rules)]


def packs_of_rank(lengths: Sequence[int], packing: Packing) -> list[list[int]]:
    """Pack items of one rank, by tokens or by number, as the run packs its samples. Returns the indices per pack."""
    most, size, number = packing.tokens_per_micro_batch, packing.micro_batch_size, len(lengths)
    if most is None or not number:
        return [list(range(first, min(first + size, number))) for first in range(0, number, size)]
    tokens = np.asarray(lengths)
    [packs] = plan_by_tokens(range(number), tokens, 1, most, packing.costs(tokens))
    return packs


@torch.no_grad()
def _draw_together(
    model: LlavaModel, prompts: list[LoadedSample], numbers: list[np.ndarray], rules: DrawRules
) -> list[list[Answer]]:
    device, times = model.language_model.get_input_embeddings().weight.device, rules.num_answers
    with waiting("the copy of the prompts to the device"):
        logits, cache, mask, places = _read_prompts(model, prompts, rules, device)
        uniform = torch.from_numpy(np.concatenate(numbers)).to(device)  # (B * G, max_new_tokens)
        room = torch.tensor([rules.room(prompt) for prompt in prompts], device=device).repeat_interleave(times)
        ends = torch.tensor(rules.ends, device=device)
    going = torch.arange(len(uniform), device=device)  # unfinished answers
    rows = going // times  # cache rows: answers that are equal so far share a row
    found: list[list[tuple[int, float, float]]] = [[] for _ in range(len(uniform))]
    for step in range(rules.max_new_tokens):
        tokens, log_probs, entropies = _draw(logits, rows, uniform[going, step], rules)
        with waiting("the next token"):
            for i, *drawn in zip(going.tolist(), tokens.tolist(), log_probs.tolist(), entropies.tolist()):
                found[i].append(tuple(drawn))
            if step + 1 == rules.max_new_tokens:
                break
            stay = (~torch.isin(tokens, ends) & (room[going] > step + 1)).nonzero()[:, 0]
            if not len(stay):
                break
            going, vocabulary = going[stay], logits.shape[1]
            keys, rows = (rows[stay] * vocabulary + tokens[stay]).unique(return_inverse=True)
        before = keys // vocabulary
        _select(cache, before)
        places, mask = places[before], F.pad(mask[before], (0, 1), value=1)
        output = model.language_model.base_model(
            input_ids=(keys % vocabulary)[:, None],
            attention_mask=mask,
            position_ids=(places + step)[:, None],
            past_key_values=cache,
            use_cache=True,
        )
        logits = _logits(model, output.last_hidden_state[:, -1])
    answers = [_answer(each, rules.ends) for each in found]
    return [answers[first : first + times] for first in range(0, len(answers), times)]


def _select(cache: Cache, rows: torch.Tensor) -> None:
    """Select rows of a cache, in the given order. transformers' own method supports attention layers only."""
    for layer in cache.layers:
        if isinstance(layer, LinearAttentionLayer):
            for states in (layer.conv_states, layer.recurrent_states):
                for i, state in states.items():
                    states[i] = state[rows]
        else:
            layer.batch_select_indices(rows)


def _read_prompts(model: LlavaModel, prompts: list[LoadedSample], rules: DrawRules, device: torch.device) -> tuple:
    """Run the model over the prompts.

    Returns the logits (B, V) after each prompt, the cache, the cache's attention mask (B, L), 0 at padding, and the
    position id of the next token (B,).
    """
    batch = collate(prompts, rules.images).to(device)
    embeds, deeper = model.embed_deep(batch)
    lengths = [len(prompt.input_ids) for prompt in prompts]
    longest = max(lengths)
    missing = torch.tensor([longest - length for length in lengths], device=device)
    # The embeddings and positions of padding don't matter, because it is masked.
    padded, mask = padded_left(embeds[0], prompts)  # (B, L, D), (B, L)
    axes = batch.position_ids.flatten(0, -2).split(lengths, 1)  # per prompt (1, its tokens) or (3, its tokens)
    position_ids = torch.stack([F.pad(row, (longest - row.shape[1], 0)) for row in axes], 1)  # (1 or 3, B, L)
    is_image = torch.cat([prompt.input_ids == IMAGE_TOKEN_INDEX for prompt in prompts]).to(device)
    seen = model.vision_tower.prompt_mask(model.language_model.config, padded, mask, padded_left(is_image, prompts)[0])
    options = {}
    if deeper:
        rows = torch.arange(len(prompts), device=device).repeat_interleave(torch.tensor(lengths, device=device))
        shift = (missing.cumsum(0))[rows]  # padding tokens before each token of the flattened batch
        positions = batch.placing.positions
        options = model.vision_tower.deeper_options(positions + shift[positions], deeper)
    for name, rows in model.layer_inputs(batch.input_ids, batch.placing.positions).items():
        parts = [F.pad(row, (0, 0, 0, 0, longest - len(row), 0)) for row in rows[0].split(lengths)]
        options[name] = torch.stack(parts)  # (B, L, layers, width)
    output = model.language_model.base_model(
        inputs_embeds=padded,
        attention_mask=seen,
        position_ids=position_ids[0] if len(position_ids) == 1 else position_ids,
        use_cache=True,
        **options,
    )
    places = position_ids.amax((0, 2)) + 1
    return _logits(model, output.last_hidden_state[:, -1]), output.past_key_values, mask, places


def _logits(model: LlavaModel, hidden: torch.Tensor) -> torch.Tensor:
    """Compute logits (R, V) from hidden states (R, D)."""
    return final_logits(model.language_model.get_output_embeddings()(hidden), model.language_model.config)


def _draw(
    logits: torch.Tensor, rows: torch.Tensor, uniform: torch.Tensor, rules: DrawRules
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sample a token for each answer. rows (n,): each answer's row of logits (R, V); uniform (n,): numbers in [0, 1).

    Returns the tokens, their log-probabilities and the entropies of their distributions, (n,) each.
    """
    log_probs = (logits.float() / rules.temperature).log_softmax(-1)
    probs = log_probs.double().exp()
    up_to = _candidates(log_probs, rules).double().exp().cumsum(-1)[rows]
    tokens = torch.searchsorted(up_to, uniform[:, None] * up_to[:, -1:], right=True).clamp(max=logits.shape[-1] - 1)
    entropy = -(probs * log_probs.double().clamp(min=-1e9)).sum(-1)
    return tokens[:, 0], log_probs[rows, tokens[:, 0]], entropy[rows]


def _candidates(log_probs: torch.Tensor, rules: DrawRules) -> torch.Tensor:
    """Return log_probs (R, V) with -inf for tokens that top_k and top_p leave out."""
    warpers = LogitsProcessorList()
    if rules.top_k:
        warpers.append(TopKLogitsWarper(rules.top_k))
    if rules.top_p < 1:
        warpers.append(TopPLogitsWarper(rules.top_p))
    return warpers(None, log_probs)


def _answer(drawn: list[tuple[int, float, float]], ends: tuple[int, ...]) -> Answer:
    ids, log_probs, entropies = zip(*drawn)
    return Answer(ids, log_probs, sum(entropies), ids[-1] in ends)
