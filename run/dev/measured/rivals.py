# B padded samples, T tokens of all samples laid end to end, S supervised positions
"""Compare forward and backward of LLaVA's stage 2: this trainer, and transformers' class on padded or packed data."""

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.nn.functional as F
from bench import SMALL_VOCABULARY
from benchmark.hf_trainer import PaddingCollator, freeze
from benchmark.training import Case, opened, write_case
from transformers import AttentionInterface, AutoModelForImageTextToText

from llava_ds.batch import Batch
from llava_ds.data.collate import LoadedSample, collate
from llava_ds.data.dataset import ALONE
from llava_ds.engine.construct import build_model
from llava_ds.engine.param_groups import choose_trainable
from llava_ds.model.heads import SummedLoss

PADDED = 16  # samples of a padded batch, as in LLaVA's scripts


def rivals(vocabulary: int = 768, batches: int = 2, rounds: int = 5) -> None:
    """Print the others' processor time over ours (alternating runs, one thread), for 16 * `batches` samples.

    ours: one pack; padded: batches of 16, logits of all positions, SDPA; packed: one pack, one pass of the tower,
    logits of supervised positions, SDPA sample by sample. vocabulary: 768 gives the output layer 2 % of the padded
    FLOPs, 16384 gives 29 %.
    """
    torch.set_num_threads(1)
    shape = replace(SMALL_VOCABULARY, vocab=vocabulary)
    case = Case("stage2", shape, False, PADDED, batches, num_steps=1, tokens_per_micro_batch=4096)
    with TemporaryDirectory() as folder:
        args, plan, dataset = opened(write_case(case, Path(folder), 1))
        samples = [dataset[i] for i in range(PADDED * batches)]
        ours = build_model(plan, args.model, {"zero_optimization": {}}, torch.float32, 0, ALONE).train()
        AttentionInterface.register("by_sample", _by_sample)
        folder = args.model.model_name_or_path
        theirs = {
            kernel: AutoModelForImageTextToText.from_pretrained(folder, attn_implementation=kernel).train()
            for kernel in ("sdpa", "by_sample")
        }
    choose_trainable(ours, args)
    for model in theirs.values():
        freeze(model, args)
    batch = collate(samples, dataset.image_options)
    collator = PaddingCollator(theirs["sdpa"].config.image_token_id, plan.images.mean, plan.images.std)
    padded = [collator(samples[i : i + PADDED]) for i in range(0, len(samples), PADDED)]
    packed = _pack(collator, samples, batch)
    steps: dict[str, Callable[[], float]] = {
        "ours": lambda: _backward(ours, ours(batch, SummedLoss()).sum()),
        "packed": lambda: _backward(theirs["by_sample"], _packed_loss(theirs["by_sample"], packed, batch)),
        "padded": lambda: sum(_backward(theirs["sdpa"], _padded_loss(theirs["sdpa"], each)) for each in padded),
    }
    losses = {name: step() for name, step in steps.items()}
    print("losses:", ", ".join(f"{name} {loss:.6g}" for name, loss in losses.items()))
    print(f"{sum(batch.lengths):,} tokens, {sum(each['input_ids'].numel() for each in padded):,} with padding")
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for i in range(rounds):
        for name in list(steps)[:: 1 if i % 2 else -1]:
            began = time.process_time()
            steps[name]()
            seconds[name].append(time.process_time() - began)
    for name, step in steps.items():
        print(f"{name}:", ", ".join(f"{part} {share:.0%}" for part, share in _profile(step).items()))
    for name in ("packed", "padded"):
        ratios = sorted(b / a for a, b in zip(seconds["ours"], seconds[name]))
        print(f"{name} takes {statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f}) of our time")


def _profile(step: Callable[[], float]) -> dict[str, float]:
    """Return the shares of matrix products, attention and the rest in a step's processor time."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as found:
        step()
    times = {"matrix products": 0.0, "attention": 0.0, "the rest": 0.0}
    for each in found.key_averages():
        is_product = each.key in ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::convolution")
        part = "matrix products" if is_product else "attention" if "attention" in each.key else "the rest"
        times[part] += each.self_cpu_time_total
    return {part: seconds / sum(times.values()) for part, seconds in times.items()}


def _backward(model: torch.nn.Module, loss: torch.Tensor) -> float:
    """Compute the gradients, and return the loss."""
    model.zero_grad()
    loss.backward()
    return float(loss.detach())


def _padded_loss(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Sum the loss of a padded batch over its supervised tokens."""
    return model(**batch, num_items_in_batch=1).loss


def _pack(collator: PaddingCollator, samples: list[LoadedSample], batch: Batch) -> dict[str, object]:
    """Return the inputs of transformers' class for one pack."""
    apart = [collator([sample]) for sample in samples]
    return {
        "input_ids": torch.cat([each["input_ids"] for each in apart], 1),  # (1, T)
        "position_ids": batch.position_ids,
        "pixel_values": torch.cat([each["pixel_values"] for each in apart if "pixel_values" in each]),
        "logits_to_keep": batch.target_positions,  # (S,)
        "lengths": batch.lengths,
    }


def _packed_loss(model: torch.nn.Module, inputs: dict[str, object], batch: Batch) -> torch.Tensor:
    logits = model(**inputs).logits[0]  # (S, V)
    return F.cross_entropy(logits.float(), batch.targets, reduction="sum")


def _by_sample(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: object, **options
) -> tuple[torch.Tensor, None]:
    """Compute causal attention within samples; in the tower, whole attention. query, key, value: (1, heads, T, D)."""
    scale, lengths = options.get("scaling"), options.get("lengths")
    if lengths is None:
        return F.scaled_dot_product_attention(query, key, value, scale=scale).transpose(1, 2), None
    parts = zip(*(each.split(lengths, 2) for each in (query, key, value)))
    found = [F.scaled_dot_product_attention(*part, is_causal=True, scale=scale) for part in parts]
    return torch.cat(found, 2).transpose(1, 2), None
