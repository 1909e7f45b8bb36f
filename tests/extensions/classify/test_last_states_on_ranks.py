"""Classes and embeddings on real ranks are the textbook's: transformers' model in float64, one sample at a time."""

import json
import shutil
from pathlib import Path

import llavas
import numpy as np
import pytest
import torch
import toys
from known_flags import known, needs
from launching import ds_config, run_many, toy_run
from PIL import Image
from safetensors.torch import load_file
from textbook_pairs import BATCH, CLIP_MEAN, padded, scheduled
from torch.nn import functional as F
from transformers import AutoTokenizer

from llava_ds.data.dataset import PreflightOptions, open_encoded
from llava_ds.data.sources import SourceOptions, open_sources
from llava_ds.export.from_checkpoint import restore
from llava_ds.export.output_folder import write_folder
from llava_ds.extensions.active import OF_OBJECTIVE
from llava_ds.extensions.classify.classify import STD
from llava_ds.extensions.classify.label_records import LabelField
from llava_ds.extensions.embed.part_records import PartField
from llava_ds.files.jsonl import read_metrics

pytestmark = pytest.mark.long
STEPS, NUMBER, SAVED, LABELS, HEAD = 6, 18, 3, ["cat", "dog", "7"], "own_classify.safetensors"
PACKED = {"tokens_per_micro_batch": 200}
KINDS = {
    "single": {"objective": "classify", "labels": ",".join(LABELS)},
    "multiple": {
        "objective": "classify",
        "labels": ",".join(LABELS),
        "problem_type": "multi_label_classification",
    },
    "embed": {"objective": "embed", "embed_temperature": 0.1},
}
CLASSES = ("single", "multiple")
NOTHING = {"max_steps": 1, "learning_rate": 0, "mm_projector_lr": 0}  # is trained
LORA = {"lora_enable": True, "lora_r": 4}
TOGETHER = {"tokens_per_micro_batch": 2000}  # all records of a step, on every rank
RUNS = {  # (kind, ZeRO stage, ranks): more flags
    ("single", 2, 2): PACKED,
    ("single", 3, 2): PACKED,
    ("single", 0, 2): {},
    ("single", 0, 1): {"per_device_train_batch_size": 1},
    ("multiple", 3, 2): PACKED,
    ("multiple", 0, 1): PACKED,
    ("embed", 0, 2): {"per_device_train_batch_size": 2},
    ("embed", 2, 2): TOGETHER,
    ("embed", 3, 2): TOGETHER,
    ("embed", 0, 1): {"per_device_train_batch_size": 4},
}


def pictures(folder: Path, number: int) -> None:
    rng = np.random.default_rng(3)
    (folder / "images").mkdir(parents=True)
    for i in range(number):
        pixels = rng.integers(0, 256, (*rng.integers(20, 50, 2), 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / "images" / f"{i}.png")


def labelled(i: int, is_multiple: bool) -> dict[str, object]:
    """A record in one of four forms; a quarter is text alone."""
    label = [["cat", 7], [], ["dog"]][i % 3] if is_multiple else ["cat", "dog", 7][i % 3]
    record: dict[str, object] = {"id": f"c{i}", "label": label, **({"image": f"{i}.png"} if i % 4 else {})}
    asked = [
        {"messages": [{"role": "user", "content": f"What is it, number {i}?"}]},
        {"conversations": [{"from": "human", "value": "<image>\nWhat is it?"}]},
        {"prompt": "Is it a dog?"},
        {},
    ]
    return record | asked[i % 4]


def parts_of(i: int) -> list[tuple[str, str | None]]:
    """Text and image of a record's query, positive and negatives. Some positives are equal, and two queries."""
    query = ("What is it?", "5.png") if i in (3, 7) else (f"Which, number {i}?", f"{i}.png" if i % 2 else None)
    positive = ("a red cat" if i % 3 else f"dog {i}", f"{i}.png" if i % 4 == 2 else None)
    return [query, positive, *[(f"no {i} {k}", None) for k in range(i % 3)]]


def retrieved(i: int) -> dict[str, object]:
    """A record of ms-swift, or of sentence-transformers."""
    parts = parts_of(i)
    if i % 2:
        query, *others = ([{"role": "user", "content": text}] for text, _ in parts)
        images = [[image] if image else [] for _, image in parts]
        more = {"positive_messages": others[:1], "positive_images": images[1:2]}
        more |= {"negative_messages": others[1:]} if others[1:] else {}
        return {"messages": query, "images": images[0], **more}
    names = ["anchor", "positive", "negative", "negative_2"]
    return {name: {"text": text, "image": image} for name, (text, image) in zip(names, parts)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("heads")


@pytest.fixture(scope="module")
def given(folder) -> dict[str, dict[str, str]]:
    base = toys.write_base(folder / "base")
    llavas.write_hf(folder / "llava", base, llavas.hf_model(base))
    pictures(folder, NUMBER)
    records = {kind: [labelled(i, kind == "multiple") for i in range(NUMBER)] for kind in CLASSES}
    records["embed"] = [retrieved(i) for i in range(NUMBER)]
    for kind, each in records.items():
        (folder / f"{kind}.json").write_text(json.dumps(each))
        (folder / f"{kind}-eval.json").write_text(json.dumps(each[:7]))
    common = {"model_name_or_path": str(folder / "llava"), "image_folder": str(folder / "images")}
    return {kind: {**common, "data_path": str(folder / f"{kind}.json"), **KINDS[kind]} for kind in KINDS}


@pytest.fixture(scope="module")
def runs(folder, given) -> dict[object, Path]:
    """The runs of RUNS; and of every kind one with an eval set, whole, resumed from its first checkpoint, and one from
    its folder that only scores the eval set."""
    outputs = {at: folder / "-".join(map(str, at)) for at in RUNS}
    outputs["lora"] = folder / "lora"
    outputs |= {(kind, name): folder / f"{kind}-{name}" for kind in KINDS for name in ("whole", "resumed", "scored")}

    def flags_of(kind: str, output: Path, stage: int, **more: object) -> dict[str, object]:
        more = {"max_steps": STEPS, "warmup_ratio": 0.1, "learning_rate": 1e-3, "adam_epsilon": 1e-3, **more}
        return toy_run(given[kind], output, ds_config(stage), mm_projector_lr=5e-4, train_batch_size=BATCH, **more)

    def saved(kind: str, name: str) -> dict[str, object]:
        more = {"save_strategy": "steps", "save_steps": SAVED, "eval_steps": 4}
        more |= TOGETHER if kind == "embed" else PACKED
        return flags_of(kind, outputs[kind, name], 3, eval_data_path=folder / f"{kind}-eval.json", **more)

    for ranks in (1, 2):
        todo = [flags_of(at[0], outputs[at], at[1], **more) for at, more in RUNS.items() if at[2] == ranks]
        todo += [saved(kind, "whole") for kind in KINDS if ranks == 2]
        if ranks == 2 and known(LORA):
            todo.append(flags_of("embed", outputs["lora"], 2, **TOGETHER, **LORA))
        run_many(ranks, folder / f"launch-{ranks}", todo)
    for kind in KINDS:
        whole, resumed = outputs[kind, "whole"], outputs[kind, "resumed"]
        (resumed / "run").mkdir(parents=True)
        shutil.copytree(whole / f"checkpoint-{SAVED}", resumed / f"checkpoint-{SAVED}")
        shutil.copy(whole / "run" / "metrics.jsonl", resumed / "run")
    todo = [saved(kind, "resumed") for kind in KINDS]
    for kind in KINDS:
        more = {"eval_data_path": folder / f"{kind}-eval.json", **(TOGETHER if kind == "embed" else PACKED)}
        more |= {"model_name_or_path": outputs[kind, "whole"], **NOTHING}
        todo.append(flags_of(kind, outputs[kind, "scored"], 3) | more)
    run_many(2, folder / "again", todo)
    return outputs


def read(folder: Path, given: dict[str, str]):
    """The data set as training has it."""
    objective = given["objective"]
    OF_OBJECTIVE[objective] = PartField() if objective == "embed" else LabelField()
    sources = open_sources(
        given["data_path"], SourceOptions(image_folder=given["image_folder"], cache_dir=str(folder / "own"))
    )
    try:
        return open_encoded(
            sources, AutoTokenizer.from_pretrained(folder / "base" / "llama"),
            toys.encoding_options(supervise_last_turn_only=True), toys.image_options(mean=tuple(CLIP_MEAN)),
            PreflightOptions(cache_dir=str(folder / "own")),
        )  # fmt: skip
    finally:
        OF_OBJECTIVE.clear()


def model_of(folder: Path) -> torch.nn.Module:
    named = {"model_name_or_path": str(folder / "base/llama"), "vision_tower": str(folder / "base/clip")}
    return llavas.hf_model(named).double()


def state_of(model: torch.nn.Module, sample) -> torch.Tensor:
    """The last hidden state of a sample's prompt, without the answer."""
    labels, inputs = padded([sample])
    length = int((labels[0] >= 0).nonzero()[0])
    inputs = {name: x.double() if x.is_floating_point() else x[:, :length] for name, x in inputs.items()}
    inputs["input_ids"] = inputs["input_ids"].masked_fill(sample.input_ids[:length] < 0, model.config.image_token_id)
    return model.model(**inputs).last_hidden_state[0, -1]


def trained(folder: Path, number: int, head: torch.Tensor | None, loss_of) -> list[dict[str, float]]:
    """Loss and accuracy of every step. loss_of: maps the model and indices to losses and hits, one for each sample."""
    model = model_of(folder)
    model.model.vision_tower.requires_grad_(False)
    projector = list(model.model.multi_modal_projector.parameters())
    language = list(model.model.language_model.parameters())
    groups = [{"params": [*language, *([] if head is None else [head])], "lr": 1e-3}, {"params": projector, "lr": 5e-4}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.999), eps=1e-3, weight_decay=0.0)
    curve = []
    for indices in scheduled(optimizer, number, STEPS):
        losses, hits = loss_of(model, indices)
        loss = torch.stack(losses).mean()
        optimizer.zero_grad()
        loss.backward()
        for parameter in (p for group in groups for p in group["params"] if p.grad is None):
            parameter.grad = torch.zeros_like(parameter)  # of the projector, in a batch without images
        norm = torch.stack([p.grad.norm() for group in groups for p in group["params"]]).norm()
        optimizer.step()
        curve.append({"loss": loss.item(), "accuracy": sum(hits) / len(hits), "grad_norm": norm.item()})
    return curve


def classified(folder: Path, given: dict[str, str], kind: str) -> list[dict[str, float]]:
    samples = read(folder, given)
    torch.manual_seed(42)
    model = model_of(folder)
    with torch.random.fork_rng():
        torch.manual_seed(42)
        linear = torch.nn.Linear(model.config.text_config.hidden_size, len(LABELS), bias=False)
        torch.nn.init.normal_(linear.weight, std=STD)
    head = torch.nn.Parameter(linear.weight.detach().double())

    def loss_of(model, indices):
        losses, hits = [], []
        for i in indices:
            logits = head @ state_of(model, samples[i])
            label = labelled(i, kind == "multiple")["label"]
            names = [str(each) for each in (label if isinstance(label, list) else [label])]
            truth = torch.tensor([float(name in names) for name in LABELS], dtype=torch.float64)
            if kind == "multiple":
                losses.append(F.binary_cross_entropy_with_logits(logits, truth))
                hits.append(bool(((logits > 0) == truth.bool()).all()))
            else:
                losses.append(F.cross_entropy(logits, truth.argmax()))
                hits.append(bool(logits.argmax() == truth.argmax()))
        return losses, hits

    return trained(folder, NUMBER, head, loss_of)


def vectors_of(model: torch.nn.Module, samples, places: dict[int, list[int]], indices) -> dict[int, list[torch.Tensor]]:
    """The normalised states of all parts of some records."""
    states = {i: [state_of(model, samples[place]) for place in places[i]] for i in indices}
    return {i: [state / state.norm() for state in each] for i, each in states.items()}


def candidates_of(i: int, indices) -> list[tuple[int, int]]:
    """The record and part of everything that query i is compared with, its positive first."""
    query, positive, *_ = parts_of(i)
    others = [(j, k) for j in indices for k in range(1, len(parts_of(j))) if (j, k) != (i, 1)]
    is_equal = {(j, k) for j, k in others if parts_of(j)[k] == positive or (k == 1 and parts_of(j)[0] == query)}
    return [(i, 1), *(each for each in others if each not in is_equal)]


def embedded(folder: Path, given: dict[str, str]) -> list[dict[str, float]]:
    samples, places = read(folder, given), places_of(NUMBER)

    def loss_of(model, indices):
        vectors, losses, hits = vectors_of(model, samples, places, indices), [], []
        for i in indices:
            compared = torch.stack([vectors[j][k] for j, k in candidates_of(i, indices)])
            logits = compared @ vectors[i][0] / KINDS["embed"]["embed_temperature"]
            losses.append(-logits.log_softmax(0)[0])
            hits.append(bool(logits[0] == logits.max()))
        return losses, hits

    return trained(folder, NUMBER, None, loss_of)


def places_of(number: int) -> dict[int, list[int]]:
    """The rows of every record's parts."""
    rows = iter(range(1000))
    return {i: [next(rows) for _ in parts_of(i)] for i in range(number)}


@pytest.fixture(scope="module")
def textbook(folder, given) -> dict[str, list[dict[str, float]]]:
    found = {kind: classified(folder, given[kind], kind) for kind in CLASSES}
    return found | {"embed": embedded(folder, given["embed"])}


@pytest.mark.parametrize("at", RUNS, ids=str)
def test_training_is_the_textbooks(runs, textbook, at):
    found, exact = read_metrics(runs[at] / "run" / "metrics.jsonl"), textbook[at[0]]
    assert len(found) == STEPS
    for name in exact[0]:
        most = max(abs(row[name] - other[name]) for row, other in zip(found, exact))
        close = 5e-6 if name == "grad_norm" else 1e-6  # gradients are float32
        assert most < close * max(1.0, max(other[name] for other in exact)), (name, most)


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_is_bit_equal(runs, kind):
    whole, resumed = (read_metrics(runs[kind, name] / "run" / "metrics.jsonl") for name in ("whole", "resumed"))
    assert [row["loss"] for row in whole] == [row["loss"] for row in resumed]
    for file in ("model.safetensors", HEAD)[: 1 + (kind in CLASSES)]:
        one, other = (load_file(runs[kind, name] / file) for name in ("whole", "resumed"))
        assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_is_scored_without_training_it(runs, kind):
    whole, scored = (runs[kind, name] / "run" / "evals.jsonl" for name in ("whole", "scored"))
    [*_, last], [row] = (list(map(json.loads, path.read_text().splitlines())) for path in (whole, scored))
    names = ("loss", "accuracy", *(("f1",) if kind in CLASSES else ("recall@1", "recall@5")))
    assert [row[name] for name in names] == pytest.approx([last[name] for name in names], abs=1e-6)


@pytest.mark.parametrize("kind", CLASSES)
def test_the_folder_has_head_and_labels_also_from_a_checkpoint(runs, tmp_path, kind):
    head = load_file(runs[kind, "whole"] / HEAD)["weight"]
    restored = restore(runs[kind, "whole"] / f"checkpoint-{STEPS}", {}, None)
    write_folder(restored.export, restored.entries, tmp_path)
    assert head.shape[0] == len(LABELS) and torch.equal(head, load_file(tmp_path / HEAD)["weight"])
    for folder in (runs[kind, "whole"], tmp_path):
        found = json.loads((folder / "labels.json").read_text())
        assert found["id2label"] == {str(i): name for i, name in enumerate(LABELS)}


@pytest.mark.parametrize("kind", CLASSES)
def test_the_eval_set_has_accuracy_and_f1(runs, folder, given, kind):
    """The last one is that of transformers' class with the exported weights and head."""
    from transformers import LlavaForConditionalGeneration

    [*_, row] = [json.loads(line) for line in (runs[kind, "whole"] / "run" / "evals.jsonl").read_text().splitlines()]
    model = LlavaForConditionalGeneration.from_pretrained(runs[kind, "whole"], dtype=torch.float32).double()
    head, samples = load_file(runs[kind, "whole"] / HEAD)["weight"].double(), read(folder, given[kind])
    with torch.no_grad():
        logits = torch.stack([head @ state_of(model, samples[i]) for i in range(7)])
    is_multiple = kind == "multiple"
    labels = [labelled(i, is_multiple)["label"] for i in range(7)]
    labels = [[str(each) for each in (one if is_multiple else [one])] for one in labels]
    truth = torch.tensor([[name in one for name in LABELS] for one in labels])
    guessed = logits > 0 if is_multiple else F.one_hot(logits.argmax(1), len(LABELS)).bool()
    f1 = [2 * int((a & b).sum()) / int(a.sum() + b.sum()) for a, b in zip(truth.T, guessed.T) if (a | b).any()]
    assert row["samples"] == 7
    assert row["accuracy"] == pytest.approx((guessed == truth).all(1).double().mean().item())
    assert row["f1"] == pytest.approx(sum(f1) / len(f1))


def test_the_eval_set_has_recall(runs, folder, given):
    """The last one is that of transformers' class with the exported weights."""
    from transformers import LlavaForConditionalGeneration

    [*_, row] = [json.loads(line) for line in (runs["embed", "whole"] / "run" / "evals.jsonl").read_text().splitlines()]
    model = LlavaForConditionalGeneration.from_pretrained(runs["embed", "whole"], dtype=torch.float32).double()
    with torch.no_grad():
        vectors = vectors_of(model, read(folder, given["embed"]), places_of(7), range(7))
    places = []
    for i in range(7):
        compared = {parts_of(j)[k]: float(vectors[j][k] @ vectors[i][0]) for j, k in candidates_of(i, range(7))}
        places.append(sum(each > compared[parts_of(i)[1]] for each in compared.values()))
    for k in (1, 5):
        assert row[f"recall@{k}"] == pytest.approx(sum(place < k for place in places) / 7)
    assert row["samples"] == 7 and row["recall@5"] > 0


@needs(*LORA)
def test_embeddings_train_with_adapters(runs, textbook):
    """Before the first update, adapters change nothing."""
    found = read_metrics(runs["lora"] / "run" / "metrics.jsonl")
    assert found[0]["loss"] == pytest.approx(textbook["embed"][0]["loss"], rel=1e-6)
    assert found[-1]["loss"] != pytest.approx(textbook["embed"][STEPS - 1]["loss"], rel=1e-6)
    assert (runs["lora"] / "adapter_model.safetensors").is_file()
