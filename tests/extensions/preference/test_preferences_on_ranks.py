"""Preference optimisation on real ranks is the textbook's: padded batches of transformers' model and a frozen one."""

import copy
import math
from pathlib import Path

import llavas
import pytest
import torch
import torch.nn.functional as F
import toys
from known_flags import known
from launching import ROOT, ds_config, launch, losses, run_many, toy_run
from textbook_pairs import BATCH, padded, read_pairs, scheduled, write_pairs

from llava_ds.files.jsonl import read_metrics

STEPS, BETA = 20, 0.3
KINDS = {
    "sigmoid": {},
    "smoothed": {"label_smoothing": 0.1, "rpo_alpha": 0.5},
    "hinge": {"loss_type": "hinge"},
    "ipo": {"loss_type": "ipo"},
    "simpo": {"loss_type": "simpo", "simpo_gamma": 0.7, "label_smoothing": 0.2},
    "cpo": {"loss_type": "cpo", "cpo_alpha": 0.5, "label_smoothing": 0.1},
    "orpo": {"loss_type": "orpo"},
    "other": {},  # with a reference model that is not the start
}


def flags_of(given: dict, output_dir: Path, stage: int, **more: object) -> dict[str, object]:
    more = {
        "max_steps": STEPS,
        "warmup_ratio": 0.1,
        "beta": BETA,
        "learning_rate": 1e-3,
        "adam_epsilon": 1e-3,
        "mm_projector_lr": 5e-4,
        **more,
    }
    return toy_run(given, output_dir, ds_config(stage), train_batch_size=BATCH, objective="dpo", **more)


PACKED = {"tokens_per_micro_batch": 200}
RUNS = {  # (kind, stage, ranks, which may share samples or matrices): more flags
    **{(kind, 2, 2): PACKED for kind in KINDS},
    **{("sigmoid", stage, 2): {} for stage in (0, 1, 3)},
    ("sigmoid", 3, 1): PACKED,
    **{(kind, 0, 1): {"per_device_train_batch_size": 1} for kind in ("sigmoid", "cpo", "orpo")},
    ("orpo", 3, 1): {**PACKED, "share_prompts": False},
    **{(kind, 3, "2 shared"): {**PACKED, "sequence_parallel_size": 2} for kind in ("sigmoid", "ipo", "orpo", "other")},
    **{(kind, stage, "2 cut"): {**PACKED, "tensor_parallel_size": 2} for kind, stage in (("sigmoid", 1), ("other", 3))},
}
RUNS = {at: more for at, more in RUNS.items() if known(more)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("preferences")


@pytest.fixture(scope="module")
def given(folder) -> dict[str, str]:
    base = toys.write_base(folder / "base")
    model = llavas.hf_model(base)
    llavas.write_hf(folder / "llava", base, model)
    llavas.write_hf(folder / "other", base, other_than(model))
    return {"model_name_or_path": str(folder / "llava"), **write_pairs(folder / "data", 30)}


def other_than(model: torch.nn.Module) -> torch.nn.Module:
    """Another model of the same start."""
    model, generator = copy.deepcopy(model), torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.model.language_model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.02)
    return model


@pytest.fixture(scope="module")
def runs(folder, given) -> dict[tuple[str, int, int], Path]:
    outputs = {at: folder / "-".join(map(str, at)) for at in RUNS}
    for ranks, is_cut in ((1, False), (2, False), (2, True)):  # a process has the groups of one mesh
        todo = [
            flags_of(
                given, outputs[at], at[1], **KINDS[at[0]], **reference_of(folder, at[0]), **own_cache(outputs[at], more)
            )
            for at, more in RUNS.items()
            if (int(str(at[2])[0]), "cut" in str(at[2])) == (ranks, is_cut)
        ]
        run_many(ranks, folder / f"launch-{ranks}-{is_cut}", todo)
    return outputs


@pytest.fixture(scope="module")
def textbook(folder, given) -> dict[str, list[dict[str, float]]]:
    """Loss and metrics of every step, by kind, in float64: float32 alone moves them by up to 4e-6 (hinge)."""
    pairs = read_pairs(folder, given)
    return {kind: loop(folder, pairs, kind == "other", **flags) for kind, flags in KINDS.items()}


def own_cache(output: Path, more: dict) -> dict[str, object]:
    """The flags of a run, with a cache of its own where ranks share samples, so that they compute the reference."""
    return {**more, "cache_dir": output / "cache"} if "sequence_parallel_size" in more else more


def reference_of(folder: Path, kind: str) -> dict[str, Path]:
    return {"ref_model_name_or_path": folder / "other"} if kind == "other" else {}


def loop(folder: Path, pairs: list, other: bool, **flags: object) -> list[dict[str, float]]:
    model = llavas.hf_model(
        {"model_name_or_path": str(folder / "base/llama"), "vision_tower": str(folder / "base/clip")}
    )
    frozen = (other_than(model) if other else copy.deepcopy(model)).double()
    model = model.double()
    model.model.vision_tower.requires_grad_(False)
    projector, names = (
        model.model.multi_modal_projector,
        {id(p) for p in model.model.multi_modal_projector.parameters()},
    )
    language = [p for p in model.parameters() if id(p) not in names and p.requires_grad]
    groups = [{"params": language, "lr": 1e-3}, {"params": list(projector.parameters()), "lr": 5e-4}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.999), eps=1e-3, weight_decay=0.0)
    curve = []
    for indices in scheduled(optimizer, len(pairs), STEPS):
        batch = [pairs[i].chosen for i in indices] + [pairs[i].rejected for i in indices]
        sums, lengths = answers(model, batch)
        with torch.no_grad():
            reference, _ = answers(frozen, batch)
        loss, row = by_hand(sums, reference, lengths, len(indices), **flags)
        optimizer.zero_grad()
        loss.backward()
        for parameter in (p for group in groups for p in group["params"] if p.grad is None):
            parameter.grad = torch.zeros_like(parameter)  # of the projector, in a batch without images
        optimizer.step()
        curve.append({"loss": loss.item(), **row})
    return curve


def answers(model, batch: list) -> tuple[torch.Tensor, torch.Tensor]:
    """Summed log-probabilities of the answers, and their numbers of tokens, in one padded batch as TRL has it."""
    labels, inputs = padded(batch)
    inputs = {name: x.to(model.dtype) if x.is_floating_point() else x for name, x in inputs.items()}
    logits = model(**inputs).logits[:, :-1]
    wanted = labels[:, 1:]
    rows = torch.gather(logits.log_softmax(-1), 2, wanted.clamp(min=0)[..., None])[..., 0] * (wanted >= 0)
    return rows.sum(1), (wanted >= 0).sum(1)


def by_hand(
    sums, reference, lengths, pairs, loss_type="sigmoid", label_smoothing=0.0, rpo_alpha=0.0, simpo_gamma=0.5,
    cpo_alpha=0.0,
):  # fmt: skip
    """TRL's formulas, from its DPOTrainer, CPOTrainer and ORPOTrainer."""
    own = (sums / lengths)[:pairs].mean()
    if loss_type in ("ipo", "simpo", "orpo"):
        sums, reference = sums / lengths, reference / lengths
    if loss_type in ("simpo", "cpo", "orpo"):
        reference = torch.zeros_like(reference)
    chosen, rejected = (sums - reference)[:pairs], (sums - reference)[pairs:]
    delta = chosen - rejected
    if loss_type == "hinge":
        each = torch.relu(1 - BETA * delta)
    elif loss_type == "ipo":
        each = (delta - 1 / (2 * BETA)) ** 2
    elif loss_type == "orpo":
        each, rpo_alpha = -BETA * F.logsigmoid(torch.logit(chosen.exp()) - torch.logit(rejected.exp())), 1.0
    else:
        delta = delta - (simpo_gamma / BETA if loss_type == "simpo" else 0)
        each = -F.logsigmoid(BETA * delta) * (1 - label_smoothing) - F.logsigmoid(-BETA * delta) * label_smoothing
    loss = each.mean() - (rpo_alpha + cpo_alpha) * own
    row = {
        "rewards/chosen": BETA * chosen.mean().item(),
        "rewards/accuracies": (chosen > rejected).float().mean().item(),
        "rewards/margins": BETA * (chosen - rejected).mean().item(),
    }
    return loss, row


@pytest.mark.long
@pytest.mark.parametrize("at", RUNS, ids=str)
def test_training_is_the_textbooks(runs, textbook, at):
    found, exact = read_metrics(runs[at] / "run" / "metrics.jsonl"), textbook[at[0]]
    assert len(found) == STEPS
    for name in exact[0]:
        # Before the first update, which warm-up delays to the second step, all margins are zero.
        first = 2 if name == "rewards/accuracies" and at[0] != "other" else 0
        most = max(abs(row[name] - other[name]) for row, other in list(zip(found, exact))[first:])
        limit = 1e-6 if name == "loss" else 4e-6
        assert most < limit * max(1.0, max(abs(other[name]) for other in exact)), (name, most)


@pytest.mark.long
def test_the_first_loss_is_ln_2(runs):
    assert losses(runs["sigmoid", 2, 2])[0] == pytest.approx(math.log(2), abs=1e-9)


@pytest.mark.long
def test_the_tower_sees_an_image_once_for_both_answers(folder, given):
    """The dry run's first micro-batch: three of its pairs have an image."""
    flags = flags_of(given, folder / "dry", 2, dry_run=True, verbose=True, shuffle=False)
    words = [token for name, value in flags.items() for token in (f"--{name}", str(value))]
    done = launch(1, ROOT / "run" / "train.py", *words)
    assert done.returncode == 0 and "4 samples" in done.stdout and "2 image tiles" in done.stdout, done.stdout
