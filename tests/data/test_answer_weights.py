"""Weights of answers in the records reach the loss, and nothing else changes."""

import copy
import importlib.util
import json
from pathlib import Path

import packed_step
import pytest
import torch
import toys
from extension_there import needs_extension
from launching import ROOT
from PIL import Image
from transformers import AutoModelForCausalLM, AutoTokenizer

from llava_ds.constants import IGNORE_INDEX, DataError
from llava_ds.data.collate import collate
from llava_ds.model import attention
from llava_ds.model.llava import LlavaModel
from llava_ds.model.projector import build_projector
from llava_ds.train.objectives.objective import SFT

KINDS = "ittiit"
# Of the answers of the samples in turn; None: the turn has none.
WEIGHTS = (0.5, None, 2, 0.25, 1, None, 0, 0.75)


def write(folder: Path, weights=WEIGHTS, kinds: str = KINDS, **changed: object) -> dict[str, str]:
    """Toy data of which answers have these weights, again and again; returns the flags that name them."""
    data = toys.write_data(folder, kinds, **changed)
    path = Path(data["data_path"])
    records = json.loads(path.read_text())
    answers = [turn for record in records for turn in record["conversations"] if turn["from"] == "gpt"]
    for i, answer in enumerate(answers):
        if (weight := weights[i % len(weights)]) is not None:
            answer["weight"] = weight
    path.write_text(json.dumps(records))
    return data


def answers_of(record: dict) -> list[tuple[str, float]]:
    """The text of each answer that is learned, with its end, and its weight."""
    turns = [turn for turn in record["conversations"] if turn["from"] == "gpt"]
    return [(f"{turn['value']}</s>", turn.get("weight", 1)) for turn in turns if turn.get("weight", 1)]


@pytest.fixture
def opened(tmp_path, tokenizer):
    def open_with(name: str, weights=WEIGHTS, kinds: str = KINDS, **changed):
        data = write(tmp_path / name, weights, kinds)
        return toys.encoded(**data, tokenizer=tokenizer, cache_dir=tmp_path / "cache", **changed)

    return open_with


def runs(sample, tokenizer) -> list[tuple[str, float]]:
    """The supervised text of a sample by runs of one weight that no other token interrupts."""
    weights = torch.ones(len(sample.labels)) if sample.weights is None else sample.weights
    found: list[tuple[list[int], float]] = []
    before = False
    for token, weight in zip(sample.labels.tolist(), weights.tolist()):
        if token != IGNORE_INDEX:
            if not before:
                found.append(([], weight))
            assert weight == found[-1][1]
            found[-1][0].append(token)
        before = token != IGNORE_INDEX
    return [(tokenizer.decode(ids), weight) for ids, weight in found]


def test_every_token_of_an_answer_has_its_weight(opened, tokenizer, tmp_path):
    data = opened("data")
    records = json.loads((tmp_path / "data/data.json").read_text())
    assert len(data) == len(records)
    for i, record in enumerate(records):
        assert runs(data[i], tokenizer) == answers_of(record)
        row = data.row(int(data.rows[i]))
        assert (row["weights"] is None) == (data[i].weights is None) == all(w == 1 for _, w in answers_of(record))
    number = sum(any(weight != 1 for _, weight in answers_of(record)) for record in records)
    assert f"{number} samples have answers with a loss weight other than 1" in data.summary()
    rest, part = data.without_part(0.3, seed=1)
    assert rest.index.facts["weighed"] + part.index.facts["weighed"] == number
    batch = collate([data[i] for i in range(len(data))], data.image_options)
    assert len(batch.target_weights) == len(batch.targets)
    assert set(batch.target_weights.tolist()) == {0.25, 0.5, 0.75, 1, 2}


def test_weights_of_one_are_as_none(opened):
    plain, ones = opened("plain", (None,)), opened("ones", (1, 1.0))
    assert ones.index.facts["weighed"] == 0 and ones.table.column("weights").null_count == len(KINDS)
    assert not any("with a loss weight" in line for line in ones.summary())
    for i in range(len(KINDS)):
        assert ones[i].weights is plain[i].weights is None
        assert torch.equal(ones[i].labels, plain[i].labels) and torch.equal(ones[i].input_ids, plain[i].input_ids)
    batch = collate([ones[i] for i in range(len(KINDS))], ones.image_options)
    assert batch.target_weights is None


def test_a_cut_sample_keeps_the_weights_of_what_is_left(opened, tokenizer):
    whole, cut = opened("data"), opened("data", encoding=toys.encoding_options(max_length=160))
    short = [i for i in range(len(cut)) if len(cut[i].labels) < len(whole[int(cut.rows[i])].labels)]
    assert short
    for i in range(len(cut)):
        full, one = whole[int(cut.rows[i])], cut[i]
        if one.weights is not None:
            assert torch.equal(one.weights, full.weights[: len(one.labels)])


def test_only_what_is_learned_is_weighed(opened):
    """With the last answer alone supervised, the weights of earlier ones mean nothing."""
    encoding = toys.encoding_options(supervise_last_turn_only=True)
    data = opened("earlier", (0.5, 0.25), encoding=encoding)
    for i in range(len(data)):
        assert len(set(data[i].weights[data[i].labels != IGNORE_INDEX].tolist())) == 1


@pytest.fixture(scope="module")
def inspect_data():
    spec = importlib.util.spec_from_file_location("inspect_data", ROOT / "run" / "inspect_data.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.main


def inspected(inspect_data, tmp_path: Path, flags: dict[str, str], *more: str) -> None:
    pairs = {**flags, "cache_dir": str(tmp_path / "cache"), "model_max_length": "512"}
    inspect_data([*(token for name, value in pairs.items() for token in (f"--{name}", value)), *more])


def test_people_see_the_weights(inspect_data, tmp_path, toy_base, capsys):
    data = write(tmp_path / "d", (0.5, 0.5), "tt")
    out = tmp_path / "out.jsonl"
    inspected(inspect_data, tmp_path, {**toy_base, **data}, "--jsonl", str(out))
    shown = capsys.readouterr().out
    assert "2 samples have answers with a loss weight other than 1" in shown
    assert shown.count("weights of the loss 0.5") == 2
    for row in map(json.loads, out.read_text().splitlines()):
        assert {w for w, label in zip(row["weights"], row["labels"]) if label != IGNORE_INDEX} == {0.5}


@needs_extension("rl")
@pytest.mark.parametrize("objective", ["grpo", "ppo"])
def test_objectives_that_draw_answers_refuse_them(inspect_data, tmp_path, toy_base, objective):
    data = write(tmp_path / "d", (1, 1, 0.5), "tt", plain=True)
    path = Path(data["data_path"])
    records = json.loads(path.read_text())
    records[1]["conversations"][-1]["weight"] = 0.5
    path.write_text(json.dumps(records))
    reason = (
        rf"data\.json: record 1 \(s1\) gives its answer the weight 0\.5, but --objective {objective} takes no weights: "
        r"leave them out \(1 of 2 records has one\)"
    )
    with pytest.raises(DataError, match=reason):
        inspected(inspect_data, tmp_path, {**toy_base, **data}, "--objective", objective, "--reward_funcs", "accuracy")


@needs_extension("preference")
@pytest.mark.parametrize("objective", ["dpo", "reward"])
@pytest.mark.parametrize("which", ["chosen", "rejected"])
def test_preferences_refuse_them(inspect_data, tmp_path, toy_base, objective, which):
    answers = {"chosen": "yes", "rejected": "two"}
    record = {"id": "a", "conversations": [{"from": "human", "value": "What is it?"}]}
    record |= {name: {"from": "gpt", "value": text} for name, text in answers.items()}
    weighed = {**record, "id": "b", which: {**record[which], "weight": 0.25}}
    (tmp_path / "data.json").write_text(json.dumps([record, weighed]))
    flags = {**toy_base, "data_path": str(tmp_path / "data.json"), "objective": objective}
    with pytest.raises(
        DataError, match=rf"record 1 \(b\) gives its answer the weight 0\.25, .*--objective {objective}"
    ):
        inspected(inspect_data, tmp_path, flags)


def test_the_loss_of_a_data_set_follows_its_weights(opened):
    """Bit for bit that of none where all are 1, and half of it where all are 0.5."""
    torch.manual_seed(0)
    config = toys.language_model_config()
    text = AutoModelForCausalLM.from_config(config, attn_implementation=attention.register())
    model = LlavaModel(packed_step.Tower(), build_projector("linear", 8, config.hidden_size), text).train()
    found = []
    for name, weights in (("none", (None,)), ("ones", (1,)), ("halves", (0.5,))):
        data = opened(name, weights, kinds="ttt")
        model.zero_grad()
        micro = SFT(grad_ranks=1).forward(model, collate([data[i] for i in range(3)], data.image_options))
        micro.loss_sum.backward()
        found.append([micro.loss_sum, micro.by_source[0], *(p.grad.clone() for p in text.parameters())])
        assert micro.by_source[1].sum() == data.num_targets.sum()
    for none, one, half in zip(*found):
        assert torch.equal(none, one)
        torch.testing.assert_close(none / 2, half, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("family", ["qwen3_vl", "gemma3", "internvl"])
def test_ready_models_weigh_answers_by_their_own_templates(inspect_data, tmp_path, family):
    write_ready = pytest.importorskip("ready_models").write_ready
    write_ready(tmp_path / "model", family)
    Image.new("RGB", (60, 40), "red").save(tmp_path / "a.png")
    turns = [("user", "<image>What is it?"), ("assistant", "A cat."), ("user", "Sure?"), ("assistant", "It is red.")]
    record = {"id": "a", "images": ["a.png"], "messages": [{"role": role, "content": text} for role, text in turns]}
    plain = copy.deepcopy(record)
    record["messages"][1]["weight"], record["messages"][3]["loss_scale"] = 0.25, 3
    (tmp_path / "data.json").write_text(json.dumps([record, plain]))
    flags = {"model_name_or_path": tmp_path / "model", "data_path": tmp_path / "data.json", "image_folder": tmp_path}
    out = tmp_path / "out.jsonl"
    inspected(inspect_data, tmp_path, {name: str(path) for name, path in flags.items()}, "--jsonl", str(out))
    weighed, other = map(json.loads, out.read_text().splitlines())
    assert "weights" not in other and weighed["labels"] == other["labels"]
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    for weight, text in ((0.25, "A cat."), (3, "It is red.")):
        ids = [label for label, each in zip(weighed["labels"], weighed["weights"]) if each == weight]
        assert tokenizer.decode(ids).strip().startswith(text) and IGNORE_INDEX not in ids
    supervised = [each for each, label in zip(weighed["weights"], weighed["labels"]) if label != IGNORE_INDEX]
    assert set(supervised) == {0.25, 3}
