"""The same training at every ZeRO stage, on any number of ranks, in any layout, whatever the batches hold."""

import math
from pathlib import Path

import pytest
import torch
import toys
from launching import ds_config, losses, run_many, toy_run
from safetensors.torch import load_file

from llava_ds.arguments import ModelArguments
from llava_ds.data.collator import collate
from llava_ds.data.sampler import SampleOrder
from llava_ds.distributed import Ranks
from llava_ds.geometry import PictureOptions
from llava_ds.model.build import build_model, plan_model
from llava_ds.report.metrics import read_metrics

STEPS = 20
BATCH = 4


def flags_of(base: dict, data: dict, output_dir: Path, stage: int, **more: object) -> dict[str, object]:
    more = {
        "warmup_ratio": 0.1,
        "weight_decay": 0.1,
        "max_grad_norm": 1.0,
        "max_steps": STEPS,
        **more,
    }
    return toy_run(base | data, output_dir, ds_config(stage), train_batch_size=BATCH, **more)


def kinds_for(steps: list[str]) -> str:
    """The kinds of all records in file order, for which the shuffled order shows the given batches in turn."""
    wanted = "".join(steps)
    kinds = [""] * len(wanted)
    for position, index in enumerate(SampleOrder(len(wanted), BATCH, seed=42).epoch(0)):
        kinds[index] = wanted[position]
    return "".join(kinds)


# Micro-batches of two samples go to the ranks in turn: what the first and the second rank see, step by step.
PATTERNS = {
    "mixed": ["itit", "iiti", "ttii", "itti", "iiii"] * 4,
    "all_text": ["tttt"] * STEPS,
    "one_rank_text": ["iitt"] * STEPS,
    "alternating": ["iitt", "ttii"] * (STEPS // 2),
}


ANYRES = {"image_aspect_ratio": "anyres", "mm_patch_merge_type": "spatial_unpad"}


@pytest.fixture(scope="session")
def runs(tmp_path_factory) -> dict[tuple[str, int, int], Path]:
    """Output folders by (pattern or layout, ZeRO stage, ranks), all trained from the same weights."""
    folder = tmp_path_factory.mktemp("stages")
    base = toys.write_base(folder / "base")
    data = {name: toys.write_data(folder / name, kinds_for(pattern)) for name, pattern in PATTERNS.items()}
    outputs: dict[tuple[str, int, int], Path] = {}
    for ranks in (1, 2):
        todo = []
        for stage in (0, 1, 2, 3):
            for name in PATTERNS if stage == 3 else ("mixed",):
                out = outputs[name, stage, ranks] = folder / f"{name}-{stage}-{ranks}"
                todo.append(flags_of(base, data[name], out, stage))
        for layout, stage, on_ranks, more in (
            ("accumulated", 2, (1, 2), {"per_device_train_batch_size": 1}),
            ("by_tokens", 3, (1, 2), {"tokens_per_micro_batch": 90}),
            # Room for one layer that keeps what it made and one that runs again.
            ("recomputed", 3, (2,), {"gradient_checkpointing": "auto", "activation_memory_gb": 0.0011}),
            ("micro_batch", 2, (1, 2), {"per_device_train_batch_size": 2, "loss_reduction": "micro_batch"}),
            ("bf16", 1, (2,), {"bf16": True}),
            ("bf16", 3, (2,), {"bf16": True}),
            ("anyres", 0, (1,), ANYRES),
            ("anyres", 3, (2,), ANYRES),
        ):
            if ranks not in on_ranks:
                continue
            out = outputs[layout, stage, ranks] = folder / f"{layout}-{stage}-{ranks}"
            todo.append(flags_of(base, data["alternating" if more is ANYRES else "mixed"], out, stage, **more))
        run_many(ranks, folder / f"launch-{ranks}", todo)
    return outputs


@pytest.fixture(scope="session")
def plain_torch(runs) -> dict[str, list[float]]:
    """The losses of the "mixed" run from a loop without DeepSpeed, sample by sample, by kind of loss reduction.

    "micro_batch" has two micro-batches of two samples a step.
    """
    folder = runs["mixed", 0, 1].parent
    args = ModelArguments(model_name_or_path=str(folder / "base/llama"), vision_tower=str(folder / "base/clip"))
    plan, ranks = plan_model(args, 512), Ranks(0, 0, 1, torch.device("cpu"))
    spec = plan.images
    dataset = toys.encoded(
        str(folder / "mixed/data.json"),
        str(folder / "mixed/images"),
        tokenizer=plan.tokenizer,
        cache_dir=folder / "cache",
        pictures=PictureOptions(spec.size, spec.patch_size, spec.mean),
    )
    curves = {}
    for reduction in ("token", "micro_batch"):
        model = build_model(plan, args, {"zero_optimization": {"stage": 0}}, torch.float32, 42, ranks)
        model.vision_tower.requires_grad_(False)
        groups = [
            {"params": [p for p in part.parameters() if (p.ndim > 1) == decays], "lr": rate, "weight_decay": decay}
            for part, rate in ((model.language_model, 2e-3), (model.projector, 1e-3))
            for decays, decay in ((True, 0.1), (False, 0.0))
        ]
        optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.999), eps=1e-8)
        peak = [group["lr"] for group in optimizer.param_groups]
        order, curve = SampleOrder(STEPS * BATCH, BATCH, seed=42).epoch(0), []
        for step in range(STEPS):
            # Warm-up over 2 of 20 steps from 0, then half a cosine.
            factor = step / 2 if step < 2 else 0.5 * (1 + math.cos(math.pi * (step - 2) / 18))
            for group, rate in zip(optimizer.param_groups, peak):
                group["lr"] = rate * factor
            samples = [dataset[i] for i in order[step * BATCH : (step + 1) * BATCH]]
            losses_of = [model(collate([sample], dataset.pictures)) for sample in samples]
            counts = [int((sample.labels[1:] != -100).sum()) for sample in samples]
            if reduction == "token":
                loss = sum(losses_of) / sum(counts)
            else:
                halves = [sum(losses_of[h : h + 2]) / sum(counts[h : h + 2]) for h in (0, 2)]
                loss = sum(halves) / 2
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_([p for group in groups for p in group["params"]], 1.0)
            optimizer.step()
            curve.append(loss.item())
        curves[reduction] = curve
    return curves


def largest_difference(one: list[float], other: list[float]) -> float:
    assert len(one) == len(other) == STEPS
    return max(abs(a - b) for a, b in zip(one, other))


def test_training_moves_the_loss(runs):
    curve = losses(runs["mixed", 0, 1])
    assert curve[-1] < curve[0] - 0.5


def test_training_is_what_a_plain_torch_loop_computes(runs, plain_torch):
    assert largest_difference(plain_torch["token"], losses(runs["mixed", 0, 1])) < 1e-5


@pytest.mark.parametrize("ranks", [1, 2])
def test_micro_batch_reduction_is_the_mean_of_the_micro_batches_means(runs, plain_torch, ranks):
    assert largest_difference(plain_torch["micro_batch"], plain_torch["token"]) > 1e-3
    assert largest_difference(plain_torch["micro_batch"], losses(runs["micro_batch", 2, ranks])) < 1e-5
    for row in read_metrics(runs["micro_batch", 2, ranks] / "metrics.jsonl"):
        means = row["micro_batch_losses"]  # by rank, in order
        assert [len(own) for own in means] == [2 // ranks] * ranks
        assert abs(sum(map(sum, means)) / 2 - row["loss"]) < 1e-6


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_every_stage_gives_the_same_curve(runs, stage, ranks):
    assert largest_difference(losses(runs["mixed", 0, 1]), losses(runs["mixed", stage, ranks])) < 1e-5


@pytest.mark.parametrize(
    ("layout", "stage", "ranks"),
    [("accumulated", 2, 1), ("accumulated", 2, 2), ("by_tokens", 3, 1), ("by_tokens", 3, 2), ("recomputed", 3, 2)],
)
def test_the_layout_changes_nothing(runs, layout, stage, ranks):
    assert largest_difference(losses(runs["mixed", 0, 1]), losses(runs[layout, stage, ranks])) < 1e-5


def test_bf16_follows_fp32_and_every_stage_follows_the_other(runs):
    reference = losses(runs["mixed", 0, 1])
    sharded, whole = losses(runs["bf16", 3, 2]), losses(runs["bf16", 1, 2])
    assert 1e-5 < largest_difference(reference, whole) < 0.1  # it is another precision, and the same training
    assert largest_difference(sharded, whole) < 0.05


@pytest.mark.parametrize("pattern", ["all_text", "one_rank_text", "alternating"])
def test_ranks_without_pictures_do_not_hang_and_learn_the_same(runs, pattern):
    assert largest_difference(losses(runs[pattern, 3, 1]), losses(runs[pattern, 3, 2])) < 1e-5


def test_the_newline_trains_alike_partitioned_where_a_rank_shows_no_picture(runs):
    """These runs export, too, and compare transformers' logits with their own."""
    reference = losses(runs["anyres", 0, 1])
    assert (
        reference[-1] < reference[0] - 0.5 and largest_difference(reference, losses(runs["alternating", 3, 1])) > 1e-2
    )
    assert largest_difference(reference, losses(runs["anyres", 3, 2])) < 1e-5


def test_the_newline_is_drawn_by_the_seed_alone_and_has_learned(runs):
    base = runs["anyres", 0, 1].parent / "base"
    folders = {"model_name_or_path": str(base / "llama"), "vision_tower": str(base / "clip")}
    args = ModelArguments(**folders, mm_patch_merge_type="spatial_unpad")
    plan, ranks = plan_model(args, 512), Ranks(0, 0, 1, torch.device("cpu"))
    fresh = build_model(plan, args, {"zero_optimization": {"stage": 0}}, torch.float32, 42, ranks).newline.embedding
    trained = [load_file(runs[("anyres", *at)] / "model.safetensors")["image_newline"] for at in ((0, 1), (3, 2))]
    assert 1e-4 < (trained[0] - fresh).abs().max() < 0.1  # twenty steps from where it was drawn
    assert (trained[0] - trained[1]).abs().max() < 1e-5
