"""The same training at every ZeRO stage, on any number of ranks, in any layout, whatever the batches hold."""

import math
from pathlib import Path

import pytest
import torch
import toys
from extension_there import if_there
from launching import ds_config, losses, run_many, toy_run
from safetensors.torch import load_file

from llava_ds.config.arguments import ModelArguments
from llava_ds.data.collate import collate
from llava_ds.data.sample_order import SampleOrder
from llava_ds.engine.construct import build_model
from llava_ds.files.jsonl import read_metrics
from llava_ds.geometry import ImageOptions
from llava_ds.model.open.model_plan import plan_model
from llava_ds.runtime.ranks import Ranks

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


# (pattern or layout, ZeRO stage, ranks) and the flags it is trained with.
ACCUMULATED = {"per_device_train_batch_size": 1}
RECOMPUTED = if_there("auto_layers", gradient_checkpointing="auto", activation_memory_gb=0.0011)
BY_TOKENS = {"tokens_per_micro_batch": 90}
MICRO_BATCH = {"per_device_train_batch_size": 2, "loss_reduction": "micro_batch"}
DAILY = {
    **{("mixed", stage, ranks): {} for stage, ranks in ((0, 1), (3, 2))},
    **{("alternating", 3, ranks): {} for ranks in (1, 2)},
    ("accumulated", 2, 2): ACCUMULATED,
    ("by_tokens", 3, 2): BY_TOKENS,
    ("recomputed", 3, 2): RECOMPUTED,
    ("micro_batch", 2, 2): MICRO_BATCH,
    ("bf16", 1, 2): {"bf16": True},
    ("bf16", 3, 2): {"bf16": True},
}
MORE = {
    **{("mixed", stage, ranks): {} for stage, ranks in ((1, 1), (2, 1), (3, 1), (0, 2), (1, 2), (2, 2))},
    **{(pattern, 3, ranks): {} for pattern in ("all_text", "one_rank_text") for ranks in (1, 2)},
    ("anyres", 0, 1): ANYRES,
    ("anyres", 3, 2): ANYRES,
    ("accumulated", 2, 1): ACCUMULATED,
    ("micro_batch", 2, 1): MICRO_BATCH,
    ("by_tokens", 3, 1): BY_TOKENS,
}


def train_all(folder: Path, name: str, wanted: dict[tuple[str, int, int], dict]) -> dict[tuple[str, int, int], Path]:
    """Output folders, one launch for each number of ranks."""
    base = {"model_name_or_path": str(folder / "base/llama"), "vision_tower": str(folder / "base/clip")}
    outputs = {at: folder / "-".join(map(str, at)) for at in wanted}
    for ranks in (1, 2):
        todo = []
        for (kind, stage, on_ranks), more in wanted.items():
            if on_ranks == ranks:
                data = folder / (kind if kind in PATTERNS else "alternating" if more is ANYRES else "mixed")
                given = {"data_path": str(data / "data.json"), "image_folder": str(data / "images")}
                todo.append(flags_of(base, given, outputs[kind, stage, ranks], stage, **more))
        run_many(ranks, folder / f"{name}-{ranks}", todo)
    return outputs


@pytest.fixture(scope="session")
def runs(tmp_path_factory) -> dict[tuple[str, int, int], Path]:
    """Output folders by (pattern or layout, ZeRO stage, ranks), all trained from the same weights."""
    folder = tmp_path_factory.mktemp("stages")
    toys.write_base(folder / "base")
    for name, pattern in PATTERNS.items():
        toys.write_data(folder / name, kinds_for(pattern))
    return train_all(folder, "daily", DAILY)


@pytest.fixture(scope="session")
def more_runs(runs) -> dict[tuple[str, int, int], Path]:
    """The same of those that take too long for every day."""
    return runs | train_all(runs["mixed", 0, 1].parent, "more", MORE)


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
        images=ImageOptions(spec.size, spec.patch_size, spec.mean),
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
            losses_of = [model(collate([sample], dataset.image_options)) for sample in samples]
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


def check_micro_batch_means(runs, plain_torch, ranks: int) -> None:
    assert largest_difference(plain_torch["micro_batch"], plain_torch["token"]) > 1e-3
    assert largest_difference(plain_torch["micro_batch"], losses(runs["micro_batch", 2, ranks])) < 1e-5
    for row in read_metrics(runs["micro_batch", 2, ranks] / "run" / "metrics.jsonl"):
        means = row["micro_batch_losses"]  # by rank, in order
        assert [len(own) for own in means] == [2 // ranks] * ranks
        assert abs(sum(map(sum, means)) / 2 - row["loss"]) < 1e-6


def test_micro_batch_reduction_is_the_mean_of_the_micro_batches_means(runs, plain_torch):
    check_micro_batch_means(runs, plain_torch, 2)


@pytest.mark.long
def test_on_one_rank_it_is_too(more_runs, plain_torch):
    check_micro_batch_means(more_runs, plain_torch, 1)


SAME = ("mixed", "accumulated", "by_tokens", "recomputed")


@pytest.mark.parametrize("at", [at for at in DAILY if at[0] in SAME], ids=str)
def test_stages_ranks_and_layouts_give_the_same_curve(runs, at):
    assert largest_difference(losses(runs["mixed", 0, 1]), losses(runs[at])) < 1e-5


@pytest.mark.long
@pytest.mark.parametrize("at", [at for at in MORE if at[0] in SAME], ids=str)
def test_more_stages_ranks_and_layouts_give_it_too(more_runs, at):
    assert largest_difference(losses(more_runs["mixed", 0, 1]), losses(more_runs[at])) < 1e-5


@pytest.mark.long
def test_packing_changes_neither_loss_nor_gradient_at_any_stage(tmp_path):
    base, data = toys.write_base(tmp_path / "base"), toys.write_data(tmp_path / "data", kinds_for(PATTERNS["mixed"]))
    packed = [flags_of(base, data, tmp_path / f"{stage}", stage, tokens_per_micro_batch=90) for stage in range(4)]
    run_many(2, tmp_path / "launch", [flags_of(base, data, tmp_path / "plain", 1), *packed])
    plain = read_metrics(tmp_path / "plain" / "run" / "metrics.jsonl")
    for stage in range(4):
        found = read_metrics(tmp_path / str(stage) / "run" / "metrics.jsonl")
        for field in ("loss", "grad_norm") if stage > 0 else ("loss",):  # the engine tells no norm at stage 0
            pairs = zip([row[field] for row in found], [row[field] for row in plain], strict=True)
            assert max(abs(a - b) / abs(b) for a, b in pairs) < 1e-5, (stage, field)


def test_bf16_follows_fp32_and_every_stage_follows_the_other(runs):
    reference = losses(runs["mixed", 0, 1])
    sharded, whole = losses(runs["bf16", 3, 2]), losses(runs["bf16", 1, 2])
    assert 1e-5 < largest_difference(reference, whole) < 0.1  # it is another precision, and the same training
    assert largest_difference(sharded, whole) < 0.05


def test_ranks_without_images_do_not_hang_and_learn_the_same(runs):
    assert largest_difference(losses(runs["alternating", 3, 1]), losses(runs["alternating", 3, 2])) < 1e-5


@pytest.mark.long
@pytest.mark.parametrize("pattern", ["all_text", "one_rank_text"])
def test_ranks_that_never_see_an_image_do_not_hang_and_learn_the_same(more_runs, pattern):
    assert largest_difference(*[losses(more_runs[pattern, 3, ranks]) for ranks in (1, 2)]) < 1e-5


@pytest.mark.long
def test_the_newline_trains_alike_partitioned_where_a_rank_shows_no_image(more_runs):
    """These runs export, too, and compare transformers' logits with their own."""
    runs = more_runs
    reference = losses(runs["anyres", 0, 1])
    assert (
        reference[-1] < reference[0] - 0.5 and largest_difference(reference, losses(runs["alternating", 3, 1])) > 1e-2
    )
    assert largest_difference(reference, losses(runs["anyres", 3, 2])) < 1e-5


@pytest.mark.long
def test_the_newline_is_drawn_by_the_seed_alone_and_has_learned(more_runs):
    runs = more_runs
    base = runs["anyres", 0, 1].parent / "base"
    folders = {"model_name_or_path": str(base / "llama"), "vision_tower": str(base / "clip")}
    args = ModelArguments(**folders, mm_patch_merge_type="spatial_unpad")
    plan, ranks = plan_model(args, 512), Ranks(0, 0, 1, torch.device("cpu"))
    fresh = build_model(plan, args, {"zero_optimization": {"stage": 0}}, torch.float32, 42, ranks).newline.embedding
    trained = [load_file(runs[("anyres", *at)] / "model.safetensors")["image_newline"] for at in ((0, 1), (3, 2))]
    assert 1e-4 < (trained[0] - fresh).abs().max() < 0.1  # twenty steps from where it was drawn
    assert (trained[0] - trained[1]).abs().max() < 1e-5
