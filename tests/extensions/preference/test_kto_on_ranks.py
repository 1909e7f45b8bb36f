"""KTO on real ranks is the textbook's: padded batches of transformers' model and a frozen one, and the answers to other
prompts for the KL estimate."""

import copy
import json
from dataclasses import replace
from pathlib import Path

import llavas
import pytest
import torch
import toys
from known_flags import known
from launching import ds_config, run_many, toy_run
from test_preferences_on_ranks import answers, other_than
from textbook_pairs import BATCH, read_pairs, scheduled, write_pairs

from llava_ds.files.jsonl import read_metrics

STEPS, BETA = 10, 0.3
WEIGHTS = {"desirable_weight": 1.3, "undesirable_weight": 0.6}
PACKED = {"tokens_per_micro_batch": 200}
RUNS = {  # (ranks, ZeRO stage, what differs): more flags
    (2, 2, "packed"): PACKED,
    (2, 3, "weighted"): {**PACKED, **WEIGHTS},
    (2, 0, "other"): {},
    (2, 3, "shared tokens"): {**PACKED, "sequence_parallel_size": 2},
    (1, 0, "one by one"): {"per_device_train_batch_size": 1},
    (1, 3, "prompts apart"): {**PACKED, "share_prompts": False},
}
RUNS = {at: more for at, more in RUNS.items() if known(more)}


def write_labelled(folder: Path, number: int) -> dict[str, str]:
    """Labelled answers in several forms, two of three good, and every fourth record a pair."""
    given = write_pairs(folder, number)
    records = json.loads(Path(given["data_path"]).read_text())
    for i, record in enumerate(records):
        if i % 4 == 0:
            continue
        both = {name: record.pop(name) for name in ("chosen", "rejected")}
        record["label"] = i % 3 > 0
        said = both["chosen" if record["label"] else "rejected"]
        said = said["value"] if isinstance(said, dict) else said
        if "prompt" in record:
            record["completion"] = said
        else:
            record["conversations"].append({"from": "gpt", "value": said})
    Path(given["data_path"]).write_text(json.dumps(records))
    return given


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("labelled")


@pytest.fixture(scope="module")
def given(folder) -> dict[str, str]:
    base = toys.write_base(folder / "base")
    model = llavas.hf_model(base)
    llavas.write_hf(folder / "llava", base, model)
    llavas.write_hf(folder / "other", base, other_than(model))
    return {"model_name_or_path": str(folder / "llava"), **write_labelled(folder / "data", 22)}


@pytest.fixture(scope="module")
def runs(folder, given) -> dict[tuple[int, int, str], Path]:
    outputs = {at: folder / "-".join(map(str, at)) for at in RUNS}
    for ranks in (1, 2):
        todo = []
        for at, more in RUNS.items():
            flags = {"max_steps": STEPS, "warmup_ratio": 0.1, "beta": BETA, "learning_rate": 1e-3, **more}
            flags |= {"adam_epsilon": 1e-3, "mm_projector_lr": 5e-4}
            if at[2] == "other":
                flags["ref_model_name_or_path"] = folder / "other"
            if at[2] == "shared tokens":
                flags["cache_dir"] = outputs[at] / "cache"  # so that these ranks compute the reference
            if at[0] == ranks:
                config = ds_config(at[1])
                todo.append(toy_run(given, outputs[at], config, train_batch_size=BATCH, objective="kto", **flags))
        run_many(ranks, folder / f"launch-{ranks}", todo)
    return outputs


@pytest.fixture(scope="module")
def textbook(folder, given) -> dict[str, list[dict[str, float]]]:
    """Loss and metrics of every step, in float64."""
    items = [item.samples for item in read_pairs(folder, given, are_labelled=True)]
    labels = [
        [True, False] if "chosen" in record else [record["label"]]
        for record in json.loads(Path(given["data_path"]).read_text())
    ]
    kinds = {"weighted": WEIGHTS, "other": {"other": True}, "packed": {}}
    return {kind: loop(folder, items, labels, **flags) for kind, flags in kinds.items()}


def loop(folder, items, labels, other=False, desirable_weight=1.0, undesirable_weight=1.0) -> list[dict[str, float]]:
    """TRL's formulas, from its KTOTrainer."""
    base = {"model_name_or_path": str(folder / "base/llama"), "vision_tower": str(folder / "base/clip")}
    model = llavas.hf_model(base)
    frozen = (other_than(model) if other else copy.deepcopy(model)).double()
    model = model.double()
    model.model.vision_tower.requires_grad_(False)
    projector = list(model.model.multi_modal_projector.parameters())
    language = [p for p in model.parameters() if p.requires_grad and not any(p is other for other in projector)]
    groups = [{"params": language, "lr": 1e-3}, {"params": projector, "lr": 5e-4}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.999), eps=1e-3, weight_decay=0.0)
    curve = []
    for indices in scheduled(optimizer, len(items), STEPS):
        own = [sample for i in indices for sample in items[i]]
        mismatched = [joined(one, items[i - 1][min(k, len(items[i - 1]) - 1)])
                      for i in indices for k, one in enumerate(items[i])]  # fmt: skip
        weights = torch.tensor([1 / len(items[i]) for i in indices for _ in items[i]], dtype=torch.float64)
        good = torch.tensor([label for i in indices for label in labels[i]])
        with torch.no_grad():
            reference, far = answers(frozen, own)[0], answers(frozen, mismatched)[0]
            kl = ((answers(model, mismatched)[0] - far) * weights).sum().div(len(indices)).clamp(min=0)
        sums, _ = answers(model, own)
        ratios = sums - reference
        losses = torch.where(
            good,
            desirable_weight * (1 - torch.sigmoid(BETA * (ratios - kl))),
            undesirable_weight * (1 - torch.sigmoid(BETA * (kl - ratios))),
        )
        loss = (losses * weights).sum() / len(indices)
        optimizer.zero_grad()
        loss.backward()
        for parameter in (p for group in groups for p in group["params"] if p.grad is None):
            parameter.grad = torch.zeros_like(parameter)  # of the projector, in a batch without images
        optimizer.step()
        means = {f"{name}/{kind}": values.detach()[which].sum().item() / max(1, int(which.sum()))
                 for name, values in (("rewards", BETA * ratios), ("logps", sums))
                 for kind, which in (("chosen", good), ("rejected", ~good))}  # fmt: skip
        margin = means["rewards/chosen"] - means["rewards/rejected"]
        curve.append({"loss": loss.item(), "kl": kl.item(), "rewards/margins": margin, **means})
    return curve


def joined(own, other):
    """A prompt with the answer to another."""
    begin, from_ = (int((sample.labels >= 0).nonzero()[0]) for sample in (own, other))
    ids = torch.cat([own.input_ids[:begin], other.input_ids[from_:]])
    return replace(own, input_ids=ids, labels=torch.cat([own.labels[:begin], other.labels[from_:]]))


@pytest.mark.long
@pytest.mark.parametrize("at", RUNS, ids=str)
def test_training_is_the_textbooks(runs, textbook, at):
    found, exact = read_metrics(runs[at] / "run" / "metrics.jsonl"), textbook[at[2] if at[2] in textbook else "packed"]
    assert len(found) == STEPS and max(row["kl"] for row in exact) > 1e-3
    for name in exact[0]:
        most = max(abs(row[name] - other[name]) for row, other in zip(found, exact))
        limit = 1e-6 if name == "loss" else 1e-5  # the others are differences of sums over an answer, in float32
        assert most < limit * max(1.0, max(abs(other[name]) for other in exact)), (name, most)


@pytest.mark.long
def test_the_first_loss_is_one_half(runs):
    """The policy is the reference."""
    assert read_metrics(runs[2, 2, "packed"] / "run" / "metrics.jsonl")[0]["loss"] == pytest.approx(0.5, abs=1e-6)
