"""A reward model's training on real ranks is the textbook's: padded batches of transformers' model and a head."""

import json
import math
import shutil
from pathlib import Path

import llavas
import pytest
import torch
import torch.nn.functional as F
import toys
from known_flags import known
from launching import ds_config, losses, run_many, toy_run
from safetensors.torch import load_file
from textbook_pairs import BATCH, padded, read_pairs, scheduled, write_pairs

from llava_ds.export.from_checkpoint import restore
from llava_ds.export.output_folder import write_folder
from llava_ds.files.jsonl import read_metrics
from llava_ds.model.open.names import VALUE_HEAD_FILE

pytestmark = pytest.mark.long
STEPS = 8
KINDS = {
    "last": {},
    "centred": {"center_rewards_coefficient": 0.05},
    "tokens": {"reward_loss": "tokens"},
}
PACKED = {"tokens_per_micro_batch": 200}
RUNS = {  # (kind, stage, ranks, which may share matrices): more flags
    **{(kind, 2, 2): PACKED for kind in KINDS},
    **{("last", stage, 2): {} for stage in (0, 1)},
    ("last", 3, 2): PACKED,
    ("tokens", 3, 2): {},
    **{(kind, 3, "2 cut"): {**PACKED, "tensor_parallel_size": 2} for kind in ("last", "tokens")},
}
RUNS = {at: more for at, more in RUNS.items() if known(more)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("rewards")


@pytest.fixture(scope="module")
def given(folder) -> dict[str, str]:
    base = toys.write_base(folder / "base")
    llavas.write_hf(folder / "llava", base, llavas.hf_model(base))
    data = write_pairs(folder / "data", 30)
    records = json.loads(Path(data["data_path"]).read_text())
    for i, record in enumerate(records):
        if i % 4 == 1:
            record["margin"] = 0.3 * i
    Path(data["data_path"]).write_text(json.dumps(records))
    (folder / "eval.json").write_text(json.dumps(records[:7]))
    return {"model_name_or_path": str(folder / "llava"), **data}


def flags_of(given: dict, output_dir: Path, stage: int, **more: object) -> dict[str, object]:
    more = {
        "max_steps": STEPS,
        "warmup_ratio": 0.1,
        "learning_rate": 1e-3,
        "adam_epsilon": 1e-3,
        "mm_projector_lr": 5e-4,
        **more,
    }
    return toy_run(given, output_dir, ds_config(stage), train_batch_size=BATCH, objective="reward", **more)


SAVED = 5


@pytest.fixture(scope="module")
def runs(folder, given) -> dict[object, Path]:
    """The runs of RUNS; and one that measures an eval set, whole and resumed from its first checkpoint."""
    outputs = {at: folder / "-".join(map(str, at)) for at in RUNS}
    todo, cut = (
        [
            flags_of(given, outputs[at], at[1], **KINDS[at[0]], **more)
            for at, more in RUNS.items()
            if ("cut" in str(at[2])) == is_cut
        ]
        for is_cut in (False, True)
    )
    saving = {"save_strategy": "steps", "save_steps": SAVED, "eval_data_path": folder / "eval.json", "eval_steps": 4}
    outputs |= {name: folder / name for name in ("whole", "resumed")}
    todo.append(flags_of(given, outputs["whole"], 2, **PACKED, **saving))
    run_many(2, folder / "launch", todo)
    run_many(2, folder / "cut", cut)  # a process has the groups of one mesh
    (outputs["resumed"] / "run").mkdir(parents=True)
    shutil.copytree(outputs["whole"] / f"checkpoint-{SAVED}", outputs["resumed"] / f"checkpoint-{SAVED}")
    shutil.copy(outputs["whole"] / "run" / "metrics.jsonl", outputs["resumed"] / "run")
    run_many(2, folder / "again", [flags_of(given, outputs["resumed"], 2, **PACKED, **saving)])
    return outputs


def loop(folder: Path, pairs: list, coefficient: float = 0.0, kind: str = "last") -> list[dict[str, float]]:
    model = llavas.hf_model(
        {"model_name_or_path": str(folder / "base/llama"), "vision_tower": str(folder / "base/clip")}
    )
    model.model.vision_tower.requires_grad_(False)
    head = torch.nn.Parameter(torch.zeros(model.config.text_config.hidden_size))
    projector = list(model.model.multi_modal_projector.parameters())
    language = [head, *model.model.language_model.parameters()]
    groups = [{"params": language, "lr": 1e-3}, {"params": projector, "lr": 5e-4}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.999), eps=1e-3, weight_decay=0.0)
    curve = []
    for indices in scheduled(optimizer, len(pairs), STEPS):
        batch = [pairs[i].chosen for i in indices] + [pairs[i].rejected for i in indices]
        labels, inputs = padded(batch)
        numbers = model.model(**inputs).last_hidden_state @ head  # (2 pairs, longest)
        each, scores = [], []
        for i in range(len(indices)):
            rows = [numbers[at][labels[at] >= 0] for at in (i, len(indices) + i)]
            tokens = [labels[at][labels[at] >= 0].tolist() for at in (i, len(indices) + i)]
            scores.append([row[-1] for row in rows])
            if kind == "tokens":
                longest = max(map(len, tokens))
                first = next(k for k in range(longest) if tokens[0][k : k + 1] != tokens[1][k : k + 1])
                chosen, rejected = ([row[min(k, len(row) - 1)] for k in range(first, longest)] for row in rows)
            else:
                chosen, rejected = [rows[0][-1]], [rows[1][-1]]
            margin = pairs[indices[i]].chosen.extra.get("margin", 0.0)
            gaps = torch.stack(chosen) - torch.stack(rejected) - margin
            each.append(-F.logsigmoid(gaps).mean() + coefficient * (scores[-1][0] + scores[-1][1]) ** 2)
        loss = torch.stack(each).mean()
        optimizer.zero_grad()
        loss.backward()
        for parameter in (p for group in groups for p in group["params"] if p.grad is None):
            parameter.grad = torch.zeros_like(parameter)  # of the projector, in a batch without images
        optimizer.step()
        (chosen, rejected) = zip(*[(a.item(), b.item()) for a, b in scores])
        curve.append(
            {
                "loss": loss.item(),
                "rewards/chosen": sum(chosen) / len(chosen),
                "rewards/margins": sum(a - b for a, b in zip(chosen, rejected)) / len(chosen),
                "rewards/accuracies": sum(a > b for a, b in zip(chosen, rejected)) / len(chosen),
            }
        )
    return curve


@pytest.fixture(scope="module")
def textbook(folder, given) -> dict[str, list[dict[str, float]]]:
    pairs = read_pairs(folder, given)
    return {
        "last": loop(folder, pairs),
        "centred": loop(folder, pairs, 0.05),
        "tokens": loop(folder, pairs, kind="tokens"),
    }


@pytest.mark.parametrize("at", RUNS, ids=str)
def test_training_is_the_textbooks(runs, textbook, at):
    found, wanted = read_metrics(runs[at] / "run" / "metrics.jsonl"), textbook[at[0]]
    assert len(found) == STEPS
    for name in wanted[0]:
        # Before the first update, which warm-up delays to the second step, all scores are zero.
        first = 2 if name == "rewards/accuracies" else 0
        most = max(abs(row[name] - other[name]) for row, other in list(zip(found, wanted))[first:])
        assert most < 1e-6 * max(1.0, max(abs(other[name]) for other in wanted)), (name, most)


def test_the_first_loss_is_ln_2_where_there_are_no_margins(runs, given):
    assert losses(runs["tokens", 3, 2])[0] > math.log(2)  # some have one
    assert all(row["rewards/chosen"] == 0 for row in read_metrics(runs["last", 2, 2] / "run" / "metrics.jsonl")[:1])


def test_a_resumed_run_is_bit_equal(runs):
    whole, resumed = (read_metrics(runs[name] / "run" / "metrics.jsonl") for name in ("whole", "resumed"))
    assert [row["loss"] for row in whole] == [row["loss"] for row in resumed]
    assert torch.equal(*(load_file(runs[name] / VALUE_HEAD_FILE)["weight"] for name in ("whole", "resumed")))
    one, other = (load_file(runs[name] / "model.safetensors") for name in ("whole", "resumed"))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_it_rewards_drawn_answers_at_any_stage(runs, folder, given):
    """With a function's reward beside it; its log has both, and their weighted sum."""
    asked = {**toys.write_data(folder / "asked", "iitit"), "model_name_or_path": given["model_name_or_path"]}
    more = {
        "objective": "grpo",
        "reward_funcs": "length",
        "reward_weights": "0.5,2",
        "reward_model_name_or_path": runs["whole"],
        "num_generations": 4,
        "max_completion_length": 6,
        "max_steps": 2,
    }
    outputs = {stage: folder / f"grpo-{stage}" for stage in (2, 3)}
    todo = [toy_run(asked, output, ds_config(stage), **more) for stage, output in outputs.items()]
    run_many(2, folder / "drawing", todo)
    rows = {stage: read_metrics(output / "run" / "metrics.jsonl") for stage, output in outputs.items()}
    for row, other in zip(rows[2], rows[3], strict=True):
        score, length = row["rewards/reward_model/mean"], row["rewards/length/mean"]
        assert score != 0 and row["reward"] == pytest.approx(2 * score + 0.5 * length, rel=1e-6)
        assert score == pytest.approx(other["rewards/reward_model/mean"], rel=2e-4, abs=2e-5)


def test_the_eval_set_has_loss_and_accuracy(runs):
    rows = [json.loads(line) for line in (runs["whole"] / "run" / "evals.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [4, 8]
    assert all(0 <= row["rewards/accuracies"] <= 1 and row["samples"] == 7 for row in rows)
    assert rows[-1]["loss"] < rows[0]["loss"]


def test_a_checkpoint_becomes_the_same_folder(runs, tmp_path):
    """The head trained, so it is not the start's zeros."""
    restored = restore(runs["whole"] / f"checkpoint-{STEPS}", {}, None)
    write_folder(restored.export, restored.entries, tmp_path)
    head = load_file(tmp_path / VALUE_HEAD_FILE)["weight"]
    assert head.abs().sum() > 0 and torch.equal(head, load_file(runs["whole"] / VALUE_HEAD_FILE)["weight"])
