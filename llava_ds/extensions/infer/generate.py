# B prompts, T tokens of the longest, D language-model width
"""Generate answers, one at a time or in batches, from prompts encoded as in training."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation.streamers import BaseStreamer

from llava_ds.constants import IMAGE_TOKEN_INDEX, DataError
from llava_ds.data.collate import LoadedSample, collate, padded_left
from llava_ds.data.encoded_rows import SizedMedia, layout_of
from llava_ds.data.end_markers import end_markers
from llava_ds.data.images.decode import load_media
from llava_ds.data.sample import FileRef, Media, Message, Transcript
from llava_ds.extensions.active import architecture_of
from llava_ds.extensions.infer.infer_flags import Sampling
from llava_ds.extensions.infer.load import LoadedModel
from llava_ds.geometry import ImageOptions, Size
from llava_ds.layouts import MediaLayout
from llava_ds.model.open.hf import embed_batch
from llava_ds.runtime.device_memory import is_out_of_memory
from llava_ds.runtime.ranks import Ranks, on_every_rank, progress_bar

T = TypeVar("T")


@dataclass(frozen=True)
class Prompt:
    """A conversation that ends with a question, with its images (paths) and videos in the order of the placeholders.

    blank: replace each image by one of the same size in a single colour; tools, template_kwargs: see Transcript.
    """

    messages: tuple[Message, ...]
    images: tuple[str | Media, ...]
    blank: bool = False
    tools: str = ""
    template_kwargs: str = ""

    @property
    def transcript(self) -> Transcript:
        """The conversation as input for an Encoder."""
        return Transcript(self.messages, self.tools, self.template_kwargs)

    def answered(self, text: str) -> Transcript:
        """Return the conversation followed by an answer with this text."""
        return replace(self.transcript, messages=(*self.messages, Message("gpt", text)))


@dataclass(frozen=True)
class Answer:
    """A greedy answer.

    logprob: natural logarithm of its probability; num_tokens: its length. Both include the end marker, if generated.
    """

    text: str
    logprob: float
    num_tokens: int


def prompt_ids(loaded: LoadedModel, prompt: Prompt) -> list[int]:
    """Encode a prompt as in training, with the model's image token at image positions."""
    ids = _encode(loaded, prompt).ids
    return [loaded.model.config.image_token_id if token == IMAGE_TOKEN_INDEX else token for token in ids]


def answer(
    loaded: LoadedModel, prompts: list[Prompt], *, batch_size: int = 32, max_new_tokens: int = 64, progress: str = ""
) -> list[str]:
    """Return the texts of the greedy answers, without end markers. See greedy_answers."""
    answers = greedy_answers(loaded, prompts, batch_size=batch_size, max_new_tokens=max_new_tokens, progress=progress)
    return [each.text for each in answers]


@torch.inference_mode()
def greedy_answers(
    loaded: LoadedModel,
    prompts: list[Prompt],
    *,
    batch_size: int = 32,
    max_new_tokens: int = 64,
    progress: str = "",
) -> list[Answer]:
    """Generate the greedy answer to each prompt. progress: title of the progress bar, "" for no bar.

    All processes that share the model (loaded.ranks) have to call this with the same prompts.
    """
    encoded = _on_all(loaded, lambda: [_encode(loaded, prompt) for prompt in prompts])
    stops = _stop_ids(loaded)
    # Batches of similar lengths need little padding.
    order = sorted(range(len(prompts)), key=lambda i: len(encoded[i].ids))
    answers: list[Answer | None] = [None] * len(prompts)
    with progress_bar(total=len(prompts), desc=progress, disable=not progress, unit="question") as bar:
        for first in range(0, len(order), batch_size):
            chosen = order[first : first + batch_size]
            samples = _on_all(loaded, lambda chosen=chosen: [encoded[i].decode(loaded.image_options) for i in chosen])
            logprobs = _GreedyLogprobs()
            # Append it last, because tokens are chosen from the scores after the engine's processors.
            processors = LogitsProcessorList([*loaded.generating.get("logits_processor", ()), logprobs])
            new = loaded.model.generate(
                **_batch(loaded, samples),
                **{**loaded.generating, "logits_processor": processors},
                max_new_tokens=max_new_tokens,
                do_sample=False,
                eos_token_id=stops,
            )
            texts = loaded.tokenizer.batch_decode(new, skip_special_tokens=True)
            for i, text, (logprob, num_tokens) in zip(chosen, texts, logprobs.totals(new, stops), strict=True):
                answers[i] = Answer(text.strip(), logprob, num_tokens)
            bar.update(len(chosen))
    return answers


def _stop_ids(loaded: LoadedModel) -> list[int]:
    """Return the ids of tokens that end an answer: the end markers of training, and eos_token_id of the model."""
    given = loaded.model.generation_config.eos_token_id
    own = end_markers(loaded.encoder.options.template, loaded.encoder.tokenizer)
    return sorted({*own, *(given if isinstance(given, list) else [] if given is None else [given])})


class _GreedyLogprobs(LogitsProcessor):
    """Records the log-probability of the most probable token at each step, without changing the scores.

    It stores B numbers per step, while generate()'s output_scores would store all scores (B, V): 2 GB for 48 answers of
    64 tokens and a vocabulary of 152,000.
    """

    def __init__(self) -> None:
        self._steps: list[torch.Tensor] = []  # (B,) each

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        self._steps.append(scores.amax(dim=-1) - scores.logsumexp(dim=-1))
        return scores

    def totals(self, new: torch.Tensor, stops: list[int]) -> list[tuple[float, int]]:
        """Return (log-probability, number of tokens) of each answer up to its end marker.

        new (B, T): the generated ids.
        """
        ended = torch.isin(new, torch.tensor(stops, device=new.device))
        # (B, T), True up to and including the end marker, False for the padding after it
        counted = ended.cumsum(dim=1) - ended.int() == 0
        sums = (torch.stack(self._steps, dim=1).double() * counted).sum(dim=1)
        lengths = counted.sum(dim=1)
        # Round to four digits, because further digits depend on floating-point rounding.
        return [(round(total, 4) + 0.0, length) for total, length in zip(sums.tolist(), lengths.tolist(), strict=True)]


@dataclass(frozen=True)
class Reply:
    """An answer. ended: "marker", "length", or "stopped" by the user; first_s: time to the first token."""

    text: str
    ended: str
    num_prompt_tokens: int
    num_tokens: int
    first_s: float
    seconds: float

    @property
    def tokens_per_s(self) -> float:
        """The rate after the first token. The first token's time includes processing the prompt, so it is left out."""
        return (self.num_tokens - 1) / max(self.seconds - self.first_s, 1e-9)


@torch.inference_mode()
def stream(
    loaded: LoadedModel,
    prompt: Prompt,
    sampling: Sampling,
    on_text: Callable[[str], None] = lambda text: None,
    stopped: Callable[[], bool] = lambda: False,
) -> Reply:
    """Answer one prompt, and call on_text with each piece of text. The pieces together are the reply's text.

    stopped: called after every token; returns True to stop. Raises DataError for unusable images and conversations.
    """
    start = time.perf_counter()
    sample = _on_all(loaded, lambda: _prepare(loaded, prompt))
    num_prompt_tokens = len(sample.input_ids)
    if sampling.seed is not None:
        torch.manual_seed(sampling.seed)
    pieces = TextPieces(loaded.tokenizer, on_text, start)
    stops = _stop_ids(loaded)
    try:
        new = loaded.model.generate(
            **_batch(loaded, [sample]),
            **loaded.generating,
            **sampling.options(),
            max_new_tokens=min(sampling.max_new_tokens, loaded.context_tokens - num_prompt_tokens),
            eos_token_id=stops,
            streamer=pieces,
            stopping_criteria=StoppingCriteriaList([_Stopped(loaded.ranks, stopped)]),
        )
    except RuntimeError as error:
        if not is_out_of_memory(error, loaded.device):
            raise
        if loaded.ranks is not None and loaded.ranks.world_size > 1:
            raise  # not as DataError, after which the session would continue: other ranks are still generating
        raise DataError(
            f"not enough memory for a conversation of {num_prompt_tokens:,} tokens: begin a new one, or show "
            "fewer images"
        ) from error
    seconds = time.perf_counter() - start
    ended = "marker" if int(new[0, -1]) in stops else "stopped" if stopped() else "length"
    return Reply(pieces.shown, ended, num_prompt_tokens, new.shape[1], pieces.first_s, seconds)


class TextPieces(BaseStreamer):
    """Streams text as soon as it is final.

    transformers' TextStreamer starts anew at each line end, where Llama's tokenizers would drop a following space.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, on_text: Callable[[str], None], start: float) -> None:
        self._tokenizer, self._on_text, self._start = tokenizer, on_text, start
        self._ids: list[int] = []
        self.shown, self.first_s = "", 0.0

    def put(self, value: torch.Tensor) -> None:
        if value.numel() == 0:
            return  # empty for the prompt, because it is passed as embeddings
        self.first_s = self.first_s or time.perf_counter() - self._start
        self._ids += value.flatten().tolist()
        text = self._text()
        if not text.endswith("\ufffd"):  # the mark of an incomplete character
            self._show(text)

    def end(self) -> None:
        self._show(self._text())

    def _text(self) -> str:
        return self._tokenizer.decode(self._ids, skip_special_tokens=True).strip()

    def _show(self, text: str) -> None:
        # Compare only lengths, because invalid bytes can change the text before them.
        if more := text[len(self.shown) :]:
            self._on_text(more)
            self.shown += more


class _Stopped(StoppingCriteria):
    """Stops generation on the user's request. If several processes share the model, rank 0 decides for all."""

    def __init__(self, ranks: Ranks | None, stopped: Callable[[], bool]) -> None:
        self._ranks, self._stopped = ranks, stopped

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: object) -> torch.Tensor:
        stop = torch.full((len(input_ids),), self._stopped(), dtype=torch.bool, device=input_ids.device)
        if self._ranks is not None and self._ranks.world_size > 1:
            torch.distributed.broadcast(stop, 0)
        return stop


def _prepare(loaded: LoadedModel, prompt: Prompt) -> LoadedSample:
    """Encode a prompt and decode its images. Raises DataError if the model has no positions left for an answer."""
    encoded, room = _encode(loaded, prompt), loaded.context_tokens
    if len(encoded.ids) >= room:
        raise DataError(
            f"the conversation has {len(encoded.ids):,} tokens, images included, and the model has positions for "
            f"{room:,}: begin a new one, or show fewer images"
        )
    return encoded.decode(loaded.image_options)


@dataclass(frozen=True)
class _EncodedPrompt:
    """A prompt's ids, and its images and videos with sizes and layouts, before decoding."""

    ids: list[int]
    media: list[tuple[Media, tuple[Size, ...], MediaLayout]]
    blank: bool = False

    def decode(self, image_options: ImageOptions) -> LoadedSample:
        row = torch.tensor(self.ids)
        return LoadedSample(row, row, decode_media(self.media, self.blank, image_options))


def decode_media(
    media: list[tuple[Media, tuple[Size, ...], MediaLayout]], blank: bool, image_options: ImageOptions
) -> list[tuple[torch.Tensor, MediaLayout]]:
    """Decode images and videos from media_of() to tiles. blank: replace the tiles by a single colour."""
    found = [(load_media(one, sizes, layout, image_options), layout) for one, sizes, layout in media]
    return [(blank_like(tiles, image_options), layout) for tiles, layout in found] if blank else found


def blank_like(tiles: torch.Tensor, image_options: ImageOptions) -> torch.Tensor:
    """Return tiles (N, 3, H, W) in the padding colour: the mean of the tower's training images."""
    colour = torch.tensor([int(255 * mean) for mean in image_options.mean], dtype=tiles.dtype)
    return colour.view(3, 1, 1).expand_as(tiles).clone()


def media_of(prompt: Prompt, image_options: ImageOptions) -> list[tuple[Media, tuple[Size, ...], MediaLayout]]:
    """Return each image or video of a prompt with its sizes and layout, without decoding it."""
    media = []
    for item in prompt.images:
        one = item if isinstance(item, Media) else Media("image", (FileRef(item),))
        sized = SizedMedia.of(one, image_options)
        media.append((one, sized.sizes, layout_of(sized, len(prompt.images), image_options)))
    return media


def _encode(loaded: LoadedModel, prompt: Prompt) -> _EncodedPrompt:
    media = media_of(prompt, loaded.image_options)
    ids = loaded.encoder.prompt_ids(prompt.transcript, [layout.mark for *_, layout in media])
    return _EncodedPrompt(ids, media, prompt.blank)


def _on_all(loaded: LoadedModel, prepare: Callable[[], T]) -> T:
    """Return prepare()'s result. An error on one rank is raised on all ranks that share the model."""
    return prepare() if loaded.ranks is None else on_every_rank(loaded.ranks, prepare)


def _batch(loaded: LoadedModel, samples: list[LoadedSample]) -> dict[str, torch.Tensor]:
    """Return inputs_embeds (B, T, D) and attention_mask (B, T), padded on the left, or an architecture's own arguments.

    The code of training, instead of transformers' processor, prepares images and merges their features.
    """
    device = loaded.device
    batch = collate(samples, loaded.image_options).to(device)
    mean, std = (torch.tensor(v, device=device).view(1, 3, 1, 1) for v in (loaded.mean, loaded.std))
    pixels = (batch.pixel_values.float() / 255 - mean) / std
    if (architecture := architecture_of(loaded.model.config)) is not None:
        return architecture.prompt_inputs(loaded.model, samples, batch, pixels)
    embeds = embed_batch(loaded.model, batch, pixels.to(loaded.model.dtype))  # (1, tokens of all prompts, D)
    # Padding is masked, so its embedding does not matter.
    rows, mask = padded_left(embeds[0], samples)
    return {"inputs_embeds": rows, "attention_mask": mask}
