# B prompts, T tokens of the longest, D language-model width
"""Answers from a model, in batches, to prompts that are put together as in training."""

from dataclasses import dataclass

import torch

from llava_ds.constants import IMAGE_TOKEN_INDEX
from llava_ds.data.collator import LoadedSample, collate
from llava_ds.data.encode import Encoder, EncodingOptions, end_markers
from llava_ds.data.images import load_media, probe
from llava_ds.data.sample import FileRef, Media, Message
from llava_ds.distributed import progress_bar
from llava_ds.geometry import MediaLayout, media_layout
from llava_ds.infer.load import LoadedModel
from llava_ds.model.hf import merged_embeds


@dataclass(frozen=True)
class Prompt:
    """A conversation that ends with a question, and its pictures (paths) and videos in the order of their marks."""

    messages: tuple[Message, ...]
    images: tuple[str | Media, ...]


def make_encoder(loaded: LoadedModel) -> Encoder:
    """The encoder of training, with the template that the model was exported with."""
    return Encoder(
        loaded.tokenizer,
        EncodingOptions(
            loaded.version,
            loaded.tokenizer.model_max_length,
            getattr(loaded.model.config, "mm_use_im_start_end", False),
        ),
    )


def prompt_ids(loaded: LoadedModel, prompt: Prompt, encoder: Encoder | None = None) -> list[int]:
    """The ids that training would have given the same text, image positions as the model's image token."""
    num_tokens = [layout.num_tokens for *_, layout in _laid_out(loaded, prompt)]
    ids = (encoder or make_encoder(loaded)).prompt_ids(prompt.messages, num_tokens)
    return [loaded.model.config.image_token_id if token == IMAGE_TOKEN_INDEX else token for token in ids]


@torch.inference_mode()
def answer(
    loaded: LoadedModel,
    prompts: list[Prompt],
    *,
    batch_size: int = 32,
    max_new_tokens: int = 64,
    progress: str = "",
    encoder: Encoder | None = None,
) -> list[str]:
    """The greedy answer to each prompt, without its end marker. progress: the bar's name; empty shows none.

    encoder: make_encoder's, for who calls this often.
    """
    encoder = encoder or make_encoder(loaded)
    media = [_laid_out(loaded, prompt) for prompt in prompts]
    ids = [
        encoder.prompt_ids(prompt.messages, [layout.num_tokens for *_, layout in own])
        for prompt, own in zip(prompts, media)
    ]
    stops = end_markers(encoder.options.template, encoder.tokenizer)
    order = sorted(range(len(prompts)), key=lambda i: len(ids[i]))  # neighbours of equal length need little padding
    answers = [""] * len(prompts)
    with progress_bar(total=len(prompts), desc=progress, disable=not progress, unit="question") as bar:
        for first in range(0, len(order), batch_size):
            chosen = order[first : first + batch_size]
            batch = _batch(loaded, [ids[i] for i in chosen], [media[i] for i in chosen])
            new = loaded.model.generate(**batch, max_new_tokens=max_new_tokens, do_sample=False, eos_token_id=stops)
            for i, text in zip(chosen, loaded.tokenizer.batch_decode(new, skip_special_tokens=True)):
                answers[i] = text.strip()
            bar.update(len(chosen))
    return answers


def _laid_out(loaded: LoadedModel, prompt: Prompt) -> list[tuple[Media, tuple, MediaLayout]]:
    """Each picture or video with its sizes and layout; nothing is decoded yet."""
    laid_out = []
    for item in prompt.images:
        media = item if isinstance(item, Media) else Media("image", (FileRef(item),))
        sizes = probe(media, loaded.pictures)
        laid_out.append((media, sizes, media_layout(media.kind, sizes, len(prompt.images), loaded.pictures)))
    return laid_out


def _batch(loaded: LoadedModel, ids: list[list[int]], media: list[list[tuple]]) -> dict[str, torch.Tensor]:
    """inputs_embeds (B, T, D) and attention_mask (B, T), padded on the left.

    Pictures are prepared and merged by training's own code, whatever transformers' processor would do with them.
    """
    device = loaded.model.device
    samples = [
        LoadedSample(
            torch.tensor(row),
            torch.tensor(row),
            [(load_media(one, sizes, layout, loaded.pictures), layout) for one, sizes, layout in own],
        )
        for row, own in zip(ids, media)
    ]
    batch = collate(samples, loaded.pictures).to(device)
    mean, std = (torch.tensor(v, device=device).view(1, 3, 1, 1) for v in (loaded.mean, loaded.std))
    pixels = ((batch.pixel_values.float() / 255 - mean) / std).to(loaded.model.dtype)
    embeds = merged_embeds(loaded.model, batch, pixels)  # (1, tokens of all prompts, D)
    lengths = [len(row) for row in ids]
    longest = max(lengths)
    # The padding is masked, so any embedding will do.
    rows = [torch.nn.functional.pad(row, (0, 0, longest - len(row), 0)) for row in embeds[0].split(lengths)]
    mask = [[0] * (longest - length) + [1] * length for length in lengths]
    return {"inputs_embeds": torch.stack(rows), "attention_mask": torch.tensor(mask, device=device)}
