# B questions, V vocabulary
"""Take questions from samples (everything up to the first answer), and answer them greedily during training."""

import dataclasses
import itertools
from dataclasses import dataclass

import torch
from transformers import PreTrainedTokenizerBase

from llava_ds.constants import IGNORE_INDEX, IMAGE_TOKEN_INDEX
from llava_ds.data.collate import LoadedSample, collate
from llava_ds.data.dataset import BrokenSample, EncodedDataset
from llava_ds.data.end_markers import end_markers
from llava_ds.data.templates import TEMPLATES
from llava_ds.engine.runner import Runner
from llava_ds.geometry import ImageOptions
from llava_ds.model.heads import Logits
from llava_ds.runtime.ranks import Ranks
from llava_ds.runtime.waiting import queuing, waiting


@dataclass(frozen=True)
class SampleQuestion:
    """The part of a sample up to its first answer, and that answer's text.

    index: of the sample in its data set. images: paths for the report (EncodedDataset.images_of).
    """

    index: int
    id: str
    question: str
    images: list[str | dict[str, object]]
    reference: str
    sample: LoadedSample


def prompts_of(
    dataset: EncodedDataset, number: int, tokenizer: PreTrainedTokenizerBase, template: str
) -> list[SampleQuestion]:
    """Take the first samples of a data set with an answer and readable images, at most `number`.

    Samples with images come first, because they show more about a vision-language model.
    """
    found: list[SampleQuestion] = []
    for index in itertools.chain(dataset.positions(images=True), dataset.positions(images=False)):
        if len(found) == number:
            break
        sample = dataset[index]
        if isinstance(sample, BrokenSample):
            continue
        sample = sample.samples[0]
        supervised = (sample.labels != IGNORE_INDEX).nonzero()[:, 0].tolist()
        if not supervised or supervised[0] == 0:
            continue
        begin = supervised[0]
        after = (sample.labels[begin:] == IGNORE_INDEX).nonzero()[:, 0].tolist()
        end = begin + after[0] if after else len(sample.labels)
        shown = _shown_before(sample, begin)
        row = dataset.row(int(dataset.rows[index]))
        ids = sample.input_ids[:begin]
        question = tokenizer.decode(ids[ids != IMAGE_TOKEN_INDEX], skip_special_tokens=True)
        found.append(
            SampleQuestion(
                index=index,
                id=str(row["id"]),
                question=question.replace(TEMPLATES[template].system, "", 1).strip(),
                images=dataset.images_of(index)[: len(shown)],
                reference=tokenizer.decode(sample.input_ids[begin:end], skip_special_tokens=True).strip(),
                sample=LoadedSample(ids, torch.full_like(ids, IGNORE_INDEX), shown),
            )
        )
    return found


def _shown_before(sample: LoadedSample, position: int) -> list[tuple]:
    """Return the images of a sample whose positions are all before a position."""
    room, shown = int((sample.input_ids[:position] == IMAGE_TOKEN_INDEX).sum()), []
    for tiles, layout in sample.media:
        room -= layout.num_tokens
        if room < 0:
            break
        shown.append((tiles, layout))
    return shown


@dataclass(frozen=True)
class Decoding:
    """Greedy decoding.

    images: options that lay out images. max_length: where training truncates samples; a language model may have no more
    positions.
    """

    tokenizer: PreTrainedTokenizerBase
    template: str
    images: ImageOptions
    max_new_tokens: int
    max_length: int


@torch.no_grad()
def answers(runner: Runner, prompts: list[SampleQuestion], decoding: Decoding, ranks: Ranks) -> list[str]:
    """Return the greedy answer to each prompt, computed by the training engine at any ZeRO stage. Collective.

    All ranks compute all answers, because at ZeRO-3 no rank can compute alone. The complete sequence is recomputed for
    every token. That is fast enough for a few short answers, and needs no cache that fits the language model.
    """
    engine = runner.engine
    engine.eval()
    ends = set(end_markers(decoding.template, decoding.tokenizer))
    decoded: list[list[int]] = [[] for _ in prompts]
    going = list(range(len(prompts)))
    while going:
        batch = collate([_continued(prompts[i].sample, decoded[i]) for i in going], decoding.images)
        with waiting("the questions on their way to the device"):
            batch = batch.to(ranks.device)
        with queuing():
            logits = runner.forward(
                engine, batch, lambda engine, batch: engine(batch, Logits(batch.cu_seqlens[1:].long() - 1))
            )  # (B, V)
        chosen = batch.cu_seqlens[1:].long() if logits is None else logits.argmax(-1)
        if ranks.world_size > 1:  # ranks on different hardware may round differently
            torch.distributed.broadcast(chosen, src=ranks.world_size - 1)
        with waiting("the next token"):
            tokens = chosen.tolist()
        for i, token in zip(list(going), tokens):
            if token in ends:
                going.remove(i)
                continue
            decoded[i].append(token)
            if len(decoded[i]) == min(decoding.max_new_tokens, decoding.max_length - len(prompts[i].sample.input_ids)):
                going.remove(i)
    engine.train()
    return [decoding.tokenizer.decode(ids, skip_special_tokens=True).strip() for ids in decoded]


def _continued(sample: LoadedSample, decoded: list[int]) -> LoadedSample:
    ids = torch.cat([sample.input_ids, torch.tensor(decoded, dtype=torch.int64)])
    return dataclasses.replace(sample, input_ids=ids, labels=torch.full_like(ids, IGNORE_INDEX))
