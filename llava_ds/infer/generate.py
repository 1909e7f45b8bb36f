# B prompts, T tokens of the longest, N pictures
"""Answers from a model, in batches."""

from dataclasses import dataclass

import torch

from llava_ds.constants import IMAGE_TOKEN_INDEX
from llava_ds.data.encode import Encoder, EncodingOptions, end_markers
from llava_ds.data.images import load_image
from llava_ds.data.sample import Message
from llava_ds.distributed import progress_bar
from llava_ds.infer.load import LoadedModel


@dataclass(frozen=True)
class Prompt:
    """A conversation that ends with a question, and the paths of its pictures."""

    messages: tuple[Message, ...]
    images: tuple[str, ...]


def make_encoder(loaded: LoadedModel, template: str | None = None) -> Encoder:
    """The encoder of training; template: a key of TEMPLATES, absent the one that the model was exported with."""
    config = loaded.model.config
    return Encoder(
        loaded.processor.tokenizer,
        EncodingOptions(
            template or getattr(config, "llava_ds_version", "v1"),
            loaded.processor.tokenizer.model_max_length,
            getattr(config, "mm_use_im_start_end", False),
        ),
    )


def prompt_ids(loaded: LoadedModel, prompt: Prompt, encoder: Encoder | None = None) -> list[int]:
    """The ids that training would have given the same text, image positions as the model's image token."""
    encoder = encoder or make_encoder(loaded)
    ids = encoder.prompt_ids(prompt.messages, [loaded.num_image_tokens] * len(prompt.images))
    return [loaded.model.config.image_token_id if token == IMAGE_TOKEN_INDEX else token for token in ids]


@torch.inference_mode()
def answer(
    loaded: LoadedModel, prompts: list[Prompt], *, batch_size: int = 32, max_new_tokens: int = 64, progress: str = ""
) -> list[str]:
    """The greedy answer to each prompt, without its end marker. progress: the bar's name; empty shows none."""
    encoder = make_encoder(loaded)
    ids = [prompt_ids(loaded, prompt, encoder) for prompt in prompts]
    stops = end_markers(encoder.options.template, encoder.tokenizer)
    order = sorted(range(len(prompts)), key=lambda i: len(ids[i]))  # neighbours of equal length need little padding
    answers = [""] * len(prompts)
    with progress_bar(total=len(prompts), desc=progress, disable=not progress, unit="question") as bar:
        for first in range(0, len(order), batch_size):
            chosen = order[first : first + batch_size]
            batch = _batch(loaded, [ids[i] for i in chosen], [prompts[i].images for i in chosen])
            output = loaded.model.generate(**batch, max_new_tokens=max_new_tokens, do_sample=False, eos_token_id=stops)
            new = output[:, batch["input_ids"].shape[1] :]
            for i, text in zip(chosen, loaded.processor.tokenizer.batch_decode(new, skip_special_tokens=True)):
                answers[i] = text.strip()
            bar.update(len(chosen))
    return answers


def _batch(loaded: LoadedModel, ids: list[list[int]], images: list[tuple[str, ...]]) -> dict[str, torch.Tensor]:
    """input_ids and attention_mask (B, T), padded on the left; pixel_values (N, 3, H, W) if there are pictures."""
    device, longest = loaded.model.device, max(map(len, ids))
    filler = loaded.processor.tokenizer.pad_token_id or 0  # masked, so any id but the image token's will do
    batch = {
        "input_ids": torch.tensor([[filler] * (longest - len(row)) + row for row in ids], device=device),
        "attention_mask": torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in ids], device=device),
    }
    pictures = [load_image(path) for paths in images for path in paths]
    if pictures:
        pixels = loaded.processor.image_processor(pictures, return_tensors="pt")["pixel_values"]
        batch["pixel_values"] = pixels.to(device, loaded.model.dtype)
    return batch
