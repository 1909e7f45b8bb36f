"""Compare forward and backward of samples that share their first tokens with samples that each have a copy."""

import statistics
import time
from dataclasses import replace

import numpy as np
import torch
from transformers import LlamaConfig

from llava_ds.batch import Batch
from llava_ds.config.arguments import ModelArguments
from llava_ds.constants import IGNORE_INDEX, IMAGE_TOKEN_INDEX
from llava_ds.data.collate import LoadedSample, collate
from llava_ds.geometry import ImageOptions, media_layout
from llava_ds.model.heads import LogProbs
from llava_ds.model.llava import LlavaModel, assemble
from llava_ds.model.open.model_plan import plan_model
from llava_ds.tiny import CLIP_PATH, LLAMA_PATH


def shared_prompts(
    prompt: int = 640, answer: int = 64, answers: int = 8, prompts: int = 1, width: int = 256, layers: int = 6,
    rounds: int = 7,
) -> None:  # fmt: skip
    """Print processor seconds (alternating runs, one thread), the memory that forward keeps for backward, and the
    largest relative difference of a gradient.

    prompt, answer: tokens, including the prompt's image of 36; answers: per prompt, 2 for pairs; width, layers: of a
    Llama with 768 ids under the tiny model's tower.
    """
    model, options = _model(prompt + answer, width, layers)
    samples = [one for _ in range(prompts) for one in _answers(prompt, answer, answers, options)]
    _compare(model, samples, options, rounds)


def image_prefix(
    images: int = 2, records: int = 5, prefix: int = 611, question: int = 12, answer: int = 12, width: int = 256,
    rounds: int = 5,
) -> None:  # fmt: skip
    """Measure a pack of `records` conversations about each image, like shared_prompts.

    Also prints the share of samples that would share a prefix in a step of 128 in random order, for data about 83,000
    images (like VQAv2) and about 2,000. prefix: tokens up to the image's end (LLaVA-1.5: 35 and 576); question, answer:
    tokens.
    """
    for number in (83_000, 2_000):
        rng, about = np.random.default_rng(0), np.arange(number * records) // records
        shared = [1 - len(np.unique(rng.choice(about, 128, replace=False))) / 128 for _ in range(20)]
        print(f"{records} records about each of {number:,} images, in random order: {np.mean(shared):.2%} share")
    model, options = _model(prefix + question + answer, width, 6)
    samples = [
        replace(one, shared=prefix if one.shared else 0)
        for _ in range(images)
        for one in _answers(prefix, question + answer, records, options, question)
    ]
    _compare(model, samples, options, rounds)


def _model(length: int, width: int, layers: int) -> tuple[LlavaModel, ImageOptions]:
    """Return a Llama with 768 ids under the tiny model's tower, with random weights, and the tower's options."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    args = ModelArguments(model_name_or_path=str(LLAMA_PATH), vision_tower=str(CLIP_PATH))
    plan = plan_model(args, length)
    config = LlamaConfig(
        vocab_size=768, hidden_size=width, intermediate_size=width * 8 // 3, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=length,
    )  # fmt: skip
    model = assemble(config, plan.tower, args, torch.zeros(3), torch.ones(3)).train()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    model.vision_tower.requires_grad_(False)
    model.shorten_last_layer()
    spec = plan.images
    return model, ImageOptions(spec.size, spec.patch_size, spec.mean, "pad")


def _compare(model: LlavaModel, samples: list[LoadedSample], options: ImageOptions, rounds: int) -> None:
    """Print time, memory and gradient difference of samples that share tokens, against the same samples with copies."""
    batches = {
        "shared": collate(samples, options),
        "each its own": collate([replace(one, shared=0) for one in samples], options),
    }
    gradients = {name: _step(model, batch) for name, batch in batches.items()}
    apart = [(a - b).norm() / b.norm() for a, b in zip(*gradients.values()) if b.norm() > 0]
    print(f"largest relative difference of a gradient: {max(apart):.1e}")
    seconds: dict[str, list[float]] = {name: [] for name in batches}
    for i in range(rounds):
        for name in list(batches)[:: 1 if i % 2 else -1]:
            began = time.process_time()
            _step(model, batches[name])
            seconds[name].append(time.process_time() - began)
    saved = {name: _saved_mib(model, batch) for name, batch in batches.items()}
    for name, batch in batches.items():
        tokens = batch.input_ids.shape[1]
        print(f"{name}: {tokens:,} tokens, {statistics.median(seconds[name]):.3f} s, {saved[name]:.0f} MiB")
    ratios = sorted(b / a for a, b in zip(*seconds.values()))
    print(
        f"shared is {statistics.median(ratios):.2f} times faster ({ratios[0]:.2f} to {ratios[-1]:.2f}), with "
        f"{saved['shared'] / saved['each its own']:.2f} of the memory"
    )


def _answers(prompt: int, answer: int, number: int, options: ImageOptions, unlearned: int = 0) -> list[LoadedSample]:
    """Return answers to a prompt with an image. unlearned: tokens of an answer that are not supervised."""
    layout = media_layout("image", ((96, 96),), 1, options)
    media = [(torch.randint(0, 256, (layout.num_tiles, 3, options.size, options.size), dtype=torch.uint8), layout)]
    text = torch.randint(5, 768, (prompt - layout.num_tokens,))
    ids = torch.cat([text[:2], torch.full((layout.num_tokens,), IMAGE_TOKEN_INDEX), text[2:]])
    found = []
    for i in range(number):
        tokens = torch.randint(5, 768, (answer,))
        labels = torch.cat([torch.full_like(ids, IGNORE_INDEX), tokens])
        labels[: prompt + unlearned] = IGNORE_INDEX
        found.append(LoadedSample(torch.cat([ids, tokens]), labels, media, shared=prompt if i else 0))
    return found


def _step(model: LlavaModel, batch: Batch) -> list[torch.Tensor]:
    """Return the gradients of a weighted sum of log-probabilities."""
    model.zero_grad()
    weights = torch.linspace(-1, 1, len(batch.targets), dtype=torch.float64)
    (model(batch, LogProbs()) * weights).sum().backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def _saved_mib(model: LlavaModel, batch: Batch) -> float:
    """Return the MiB that the forward pass keeps for the backward pass, without weights."""
    weights, kept = {p.untyped_storage().data_ptr() for p in model.parameters()}, {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        _held = model(batch, LogProbs())
    return sum(kept.values()) / 2**20
