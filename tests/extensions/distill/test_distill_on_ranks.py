"""Distillation on real ranks is the textbook's: padded batches of transformers' models, student and wider teacher."""

import time
from pathlib import Path

import llavas
import pytest
import torch
import toys
from known_flags import known
from launching import ds_config, losses, run_many, toy_run
from signalled import Started
from test_divergences import textbook
from textbook_pairs import BATCH, CLIP_MEAN, padded, scheduled
from torch.nn import functional as F
from transformers import AutoTokenizer

from llava_ds.data.dataset import PreflightOptions, open_encoded
from llava_ds.data.sources import SourceOptions, open_sources
from llava_ds.files.jsonl import read_metrics

STEPS, NUMBER = 8, 18
PACKED = {"tokens_per_micro_batch": 200}
KINDS = {
    "between": {},
    "forward": {"beta": 0.0, "temperature": 0.7},
    "reverse": {"beta": 1.0, "sft_alpha": 0.5},
    "kept": {"beta": 0.3, "temperature": 0.7, "gkd_logits_topk": 5},
    "drawn": {"beta": 0.5, "lmbda": 0.6, "max_completion_length": 5, "per_device_generation_batch_size": 3},
}
RUNS = {  # (kind, ZeRO stage, ranks, which may share samples or matrices): more flags
    **{(kind, 2, "2"): PACKED for kind in KINDS},
    **{(kind, 3, "2"): PACKED for kind in ("kept", "drawn")},
    **{(kind, 0, "1"): {"per_device_train_batch_size": 1} for kind in ("kept", "drawn")},
    ("kept", 1, "2 cut"): {**PACKED, "tensor_parallel_size": 2},
    **{("between", stage, "2"): {} for stage in (0, 3)},
    ("reverse", 3, "2"): PACKED,
    ("reverse", 3, "1"): PACKED,
    ("forward", 0, "1"): {"per_device_train_batch_size": 1},
    ("reverse", 3, "2 shared"): {**PACKED, "sequence_parallel_size": 2},
    ("between", 1, "2 cut"): {**PACKED, "tensor_parallel_size": 2},
    ("between", 3, "2 cut"): {**PACKED, "tensor_parallel_size": 2},
}
RUNS = {at: more for at, more in RUNS.items() if known(more)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("distilled")


@pytest.fixture(scope="module")
def given(folder) -> dict[str, str]:
    for name, changed in (("student", {}), ("teacher", {"hidden_size": 64, "intermediate_size": 96, "seed": 3})):
        base = toys.write_base(folder / name, **changed)
        llavas.write_hf(folder / f"{name}-llava", base, llavas.hf_model(base))
    data = toys.write_data(folder / "data", "iti" * (NUMBER // 3))
    return {
        "model_name_or_path": str(folder / "student-llava"),
        "teacher_model_name_or_path": str(folder / "teacher-llava"),
        **data,
    }


@pytest.fixture(scope="module")
def runs(folder, given) -> dict[tuple[str, int, str], Path]:
    outputs = {at: folder / "-".join(map(str, at)) for at in RUNS}
    for ranks, is_cut in (("1", False), ("2", False), ("2", True)):  # a process has the groups of one mesh
        todo = []
        for at, more in RUNS.items():
            flags = {
                "max_steps": STEPS,
                "warmup_ratio": 0.1,
                "learning_rate": 1e-3,
                "adam_epsilon": 1e-3,
                **KINDS[at[0]],
            }
            flags |= {"mm_projector_lr": 5e-4, "train_batch_size": BATCH, "objective": "gkd", **more}
            if (at[2][0], "cut" in at[2]) == (ranks, is_cut):
                todo.append(toy_run(given, outputs[at], ds_config(at[1]), **flags))
        run_many(int(ranks), folder / f"launch-{ranks}-{is_cut}", todo)
    return outputs


@pytest.fixture(scope="module")
def by_hand(folder, given) -> dict[str, list[dict[str, float]]]:
    """Loss and metrics of every step, by kind, in float64."""
    sources = open_sources(
        given["data_path"], SourceOptions(image_folder=given["image_folder"], cache_dir=str(folder / "own"))
    )
    dataset = open_encoded(
        sources, AutoTokenizer.from_pretrained(folder / "student" / "llama"), toys.encoding_options(),
        toys.image_options(mean=tuple(CLIP_MEAN)), PreflightOptions(cache_dir=str(folder / "own")),
    )  # fmt: skip
    samples = [dataset[i] for i in range(len(dataset))]
    return {kind: loop(folder, samples, **flags) for kind, flags in KINDS.items() if kind != "drawn"}


def transformers_model(folder: Path, name: str) -> torch.nn.Module:
    named = {"model_name_or_path": str(folder / name / "llama"), "vision_tower": str(folder / name / "clip")}
    return llavas.hf_model(named).double()


def logits_of(model: torch.nn.Module, batch: list) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of all supervised tokens, and the tokens."""
    labels, inputs = padded(batch)
    inputs = {name: x.to(model.dtype) if x.is_floating_point() else x for name, x in inputs.items()}
    is_supervised = labels[:, 1:] >= 0
    return model(**inputs).logits[:, :-1][is_supervised], labels[:, 1:][is_supervised]


def loop(
    folder: Path, samples: list, beta=0.5, temperature=1.0, sft_alpha=0.0, gkd_logits_topk=None
) -> list[dict[str, float]]:
    model, teacher = transformers_model(folder, "student"), transformers_model(folder, "teacher")
    projector = list(model.model.multi_modal_projector.parameters())
    model.model.vision_tower.requires_grad_(False)
    language = [p for p in model.parameters() if p.requires_grad and not any(p is other for other in projector)]
    groups = [{"params": language, "lr": 1e-3}, {"params": projector, "lr": 5e-4}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.999), eps=1e-3, weight_decay=0.0)
    curve = []
    for indices in scheduled(optimizer, len(samples), STEPS):
        found, tokens = zip(*(logits_of(model, [samples[i]]) for i in indices))  # one sample at a time
        with torch.no_grad():
            wanted = torch.cat([logits_of(teacher, [samples[i]])[0] for i in indices])
        logits, tokens = torch.cat(found), torch.cat(tokens)
        logs = [(each / temperature).log_softmax(1) for each in (logits, wanted)]
        if gkd_logits_topk:
            ids = wanted.topk(gkd_logits_topk, 1).indices
            rests = [(1 - each.gather(1, ids).exp().sum(1, keepdim=True)).log() for each in logs]
            logs = [torch.cat([each.gather(1, ids), rest], 1) for each, rest in zip(logs, rests)]
        values, plain = textbook(*logs, beta).mean(), F.cross_entropy(logits, tokens)
        loss = values + sft_alpha * plain
        optimizer.zero_grad()
        loss.backward()
        for parameter in (p for group in groups for p in group["params"] if p.grad is None):
            parameter.grad = torch.zeros_like(parameter)  # of the projector, in a batch without images
        optimizer.step()
        curve.append({"loss": loss.item(), "divergence": values.item(), "cross_entropy": plain.item()})
    return curve


@pytest.mark.long
@pytest.mark.parametrize("at", [at for at in RUNS if at[0] != "drawn"], ids=str)
def test_training_is_the_textbooks(runs, by_hand, at):
    found, exact = read_metrics(runs[at] / "run" / "metrics.jsonl"), by_hand[at[0]]
    assert len(found) == STEPS and exact[0]["divergence"] > 1e-2
    for name in exact[0]:
        most = max(abs(row[name] - other[name]) for row, other in zip(found, exact))
        assert most < 1e-6 * max(1.0, max(other[name] for other in exact)), (name, most)


@pytest.mark.long
def test_drawn_answers_do_not_depend_on_the_mesh(runs, by_hand):
    """Some steps are drawn; ranks, ZeRO's stage and packing only round differently."""
    curves = {at: losses(folder) for at, folder in runs.items() if at[0] == "drawn"}
    [first, *others] = curves.values()
    assert len(others) == 2 and all(other == pytest.approx(first, abs=1e-6) for other in others)
    from_records = [abs(loss - row["loss"]) < 1e-6 for loss, row in zip(first, by_hand["between"])]
    assert from_records.index(False) > 0 and not all(from_records)


@pytest.mark.long
def test_the_teachers_numbers_are_written_once(folder, runs):
    """Runs on the same data with the same teacher share them."""
    [written] = (folder / "cache").rglob("*teacher-*")
    assert written.is_file() and written.name.startswith("teacher-")


def rows_of(out: Path) -> list[dict[str, float]]:
    names = ("loss", "divergence", "cross_entropy", "grad_norm")
    path = out / "run" / "metrics.jsonl"
    return [{name: row[name] for name in names} for row in read_metrics(path)] if path.exists() else []


@pytest.mark.long
@pytest.mark.parametrize("kind", ["drawn", "kept"])
def test_a_killed_run_ends_with_the_same_bits(folder, given, kind):
    """Killed in steps on sampled answers, or with the teacher's numbers on disk, and resumed."""
    more = {**KINDS[kind], **PACKED, "objective": "gkd", "max_steps": 2 * STEPS, "save_strategy": "steps"}
    more |= {"save_steps": 2, "max_completion_length": 24} if kind == "drawn" else {"save_steps": 2}
    whole, out = folder / f"{kind}-whole", folder / f"{kind}-killed"
    for output in (whole, out):
        with Started(2, toy_run(given, output, ds_config(3), **more)) as run:
            while output is out and len(rows_of(out)) < STEPS:
                assert run.runner.poll() is None, run.log.read_text()
                time.sleep(0.01)
            for process in run.processes() if output is out else ():
                process.kill()
            run.wait_for_end(240)
    assert STEPS <= len(rows_of(out)) < 2 * STEPS
    with Started(2, toy_run(given, out, ds_config(3), **more)) as run:
        assert run.wait_for_end(240) == 0, run.log.read_text()
    assert rows_of(out) == rows_of(whole)
    assert (out / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
