"""Preference records in every form become pairs over shared images; what is no pair is refused with the reason."""

import json
from pathlib import Path

import numpy as np
import pytest
import toys
from datasets import Dataset
from PIL import Image

from llava_ds.constants import IGNORE_INDEX, ConfigError
from llava_ds.data.collate import LoadedPair, collate
from llava_ds.data.dataset import EncodedDataset, PreflightOptions, open_encoded
from llava_ds.data.sources import SourceOptions, open_sources

QUESTION = {"from": "human", "value": "<image>\nWhat is it?"}
YES, TWO = "yes", "It is a red cat."
FORMS = {
    "LLaVA, texts": {"image": "a.png", "conversations": [QUESTION], "chosen": YES, "rejected": TWO},
    "LLaMA-Factory": {
        "images": ["a.png"],
        "conversations": [QUESTION],
        "chosen": {"from": "gpt", "value": YES},
        "rejected": {"from": "gpt", "value": TWO},
    },
    "TRL, a text": {"images": ["a.png"], "prompt": "<image>\nWhat is it?", "chosen": YES, "rejected": TWO},
    "TRL, messages": {
        "images": ["a.png"],
        "prompt": [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is it?"}]}],
        "chosen": [{"role": "assistant", "content": [{"type": "text", "text": YES}]}],
        "rejected": [{"role": "assistant", "content": [{"type": "text", "text": TWO}]}],
    },
    "TRL, implicit prompt": {
        "images": ["a.png"],
        "chosen": [{"role": "user", "content": "<image>\nWhat is it?"}, {"role": "assistant", "content": YES}],
        "rejected": [{"role": "user", "content": "<image>\nWhat is it?"}, {"role": "assistant", "content": TWO}],
    },
    "RLHF-V": {"image": "a.png", "question": "What is it?", "chosen": YES, "rejected": TWO},
    "RLHF-V, packed": {
        "image": "a.png",
        "text": json.dumps({"question": "What is it?", "chosen": YES, "rejected": TWO}),
    },
}


def opened(folder: Path, records: list[dict], tokenizer, on_bad_sample: str = "list") -> EncodedDataset:
    folder.mkdir(exist_ok=True)
    Image.new("RGB", (30, 20), "red").save(folder / "a.png")
    (folder / "data.json").write_text(json.dumps(records))
    options = SourceOptions(image_folder=str(folder), cache_dir=str(folder / "cache"), are_preferences=True)
    return open_encoded(
        open_sources(str(folder / "data.json"), options),
        tokenizer,
        toys.encoding_options(supervise_last_turn_only=True),
        toys.image_options(),
        PreflightOptions(cache_dir=str(folder / "cache"), on_bad_sample=on_bad_sample),
    )


EARLIER = [QUESTION, {"from": "gpt", "value": "A cat."}, {"from": "human", "value": "Which one?"}]
PAIRS = {
    "conversations": {"image": "a.png", "conversations": EARLIER, "chosen": YES, "rejected": TWO},
    "messages": {
        "messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hm"}],
        "chosen": YES,
    },
    "packed": FORMS["RLHF-V, packed"],
    "whole": {
        "image": "a.png",
        "conversations": EARLIER[:2],
        "chosen": [*EARLIER, {"from": "gpt", "value": YES}],
        "rejected": [],
    },
}


@pytest.mark.parametrize("kind", ["json", "parquet"])
@pytest.mark.parametrize("name", PAIRS)
def test_pairs_are_not_learned_as_conversations(name, kind, tmp_path, tokenizer):
    """LLaVA's trainer would learn the answers before the two alone, or the pair's JSON as a caption."""
    Image.new("RGB", (30, 20), "red").save(tmp_path / "a.png")
    plain = {"image": "a.png", "conversations": EARLIER[:2]}
    if name in ("messages", "packed"):
        plain = {"image": "a.png", "text": "A cat."} if name == "packed" else {"messages": PAIRS[name]["messages"]}
    for records in ([PAIRS[name]] * 3, [plain, plain, PAIRS[name]]):
        path = tmp_path / f"{len({*map(str, records)})}.{kind}"
        if kind == "json":
            path.write_text(json.dumps(records))
        else:
            Dataset.from_list([{**dict.fromkeys(PAIRS[name]), **each} for each in records]).to_parquet(path)
        options = SourceOptions(image_folder=str(tmp_path), cache_dir=str(tmp_path / "cache"))
        if records[0] is not plain:
            with pytest.raises(
                ConfigError, match=r"has .* part of a pair of answers \(--objective dpo or kto or reward learns those"
            ):
                open_sources(str(path), options)
            continue
        where = PreflightOptions(cache_dir=str(tmp_path / "cache"), on_bad_sample="list")
        data = open_encoded(
            open_sources(str(path), options), tokenizer, toys.encoding_options(), toys.image_options(), where
        )
        rows = [data.row(i) for i in range(3)]
        assert [bool(row["reason"]) for row in rows] == [False, False, True]
        assert "part of a pair of answers (--objective dpo or kto or reward learns those)" in rows[2]["reason"]


def test_the_better_answers_alone_are_learned_where_they_are_named(tmp_path, tokenizer):
    """And so is a conversation that ends with the better answer, as ms-swift's does."""
    swift = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": YES}]}
    for name, columns, record in (
        ("answer", (("answer", "chosen"),), FORMS["RLHF-V"]),
        ("conversations", (("conversations", "chosen"),), FORMS["TRL, implicit prompt"]),
        ("swift", (), {**swift, "rejected_response": TWO}),
    ):
        (tmp_path / f"{name}.json").write_text(json.dumps([record]))
        Image.new("RGB", (30, 20), "red").save(tmp_path / "a.png")
        options = SourceOptions(image_folder=str(tmp_path), cache_dir=str(tmp_path / "cache"), columns=columns)
        where = PreflightOptions(cache_dir=str(tmp_path / "cache"), on_bad_sample="list")
        sources = open_sources(str(tmp_path / f"{name}.json"), options)
        row = open_encoded(sources, tokenizer, toys.encoding_options(), toys.image_options(), where).row(0)
        assert tokenizer.decode([i for i in row["labels"] if i != IGNORE_INDEX]).strip() == f"{YES}</s>"


def answers(pair: LoadedPair, tokenizer) -> list[str]:
    """The supervised texts."""
    ids = [sample.labels[sample.labels != IGNORE_INDEX] for sample in pair.samples]
    return [tokenizer.decode(part, skip_special_tokens=True).strip() for part in ids]


@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_the_same_pair(tmp_path, tokenizer, form):
    pair = opened(tmp_path / "one", [FORMS[form]], tokenizer)[0]
    first = opened(tmp_path / "two", [FORMS["LLaVA, texts"]], tokenizer)[0]
    assert answers(pair, tokenizer) == [YES, TWO]
    for sample, other in zip(pair.samples, first.samples):
        assert sample.input_ids.tolist() == other.input_ids.tolist()
        assert sample.labels.tolist() == other.labels.tolist()


def test_the_summary_counts_both_answers(tmp_path, tokenizer):
    records = [{**FORMS["LLaVA, texts"], "id": name} for name in "abc"]
    [line] = [line for line in opened(tmp_path, records, tokenizer).summary() if " supervised" in line]
    assert line.startswith("6 answers in pairs, 3 images, ")


def test_both_answers_share_the_tiles(tmp_path, tokenizer):
    dataset = opened(tmp_path, [FORMS["LLaVA, texts"]], tokenizer)
    pair = dataset[0]
    assert pair.chosen.media[0][0] is pair.rejected.media[0][0]
    batch = collate(list(pair.samples), dataset.image_options)
    assert len(batch.pixel_values) == 1 and len(batch.cu_seqlens) == 3
    assert dataset.lengths == [sum(len(sample.input_ids) for sample in pair.samples)]
    assert batch.extra == {}
    dataset.of_answers["reference"] = np.array([[-1.5, -2.5]])
    assert collate(list(dataset[0].samples), dataset.image_options).extra["reference"].tolist() == [
        -1.5,
        -2.5,
    ]
    dataset.of_answers["reference"] = np.array([[np.nan, np.nan]])
    assert "the reference of its answers" in dataset[0].reason


def test_only_the_last_answer_is_supervised(tmp_path, tokenizer):
    talk = [QUESTION, {"from": "gpt", "value": "two"}, {"from": "human", "value": "What is it?"}]
    record = {**FORMS["LLaVA, texts"], "conversations": talk}
    assert answers(opened(tmp_path, [record], tokenizer)[0], tokenizer) == [YES, TWO]


GOOD = FORMS["LLaVA, texts"]
BAD = {
    "no rejected": ({**GOOD, "rejected": None}, "has no answer under 'rejected'"),
    "an empty answer": ({**GOOD, "chosen": ""}, "has no answer under 'chosen'"),
    "a blank answer": ({**GOOD, "chosen": "  "}, "expected an answer"),
    "equal answers": ({**GOOD, "rejected": YES}, "the same"),
    "a number": ({**GOOD, "chosen": 3}, "expected text, a message or a list of messages"),
    "no question": ({"image": "a.png", "chosen": YES, "rejected": TWO}, "no question"),
    "two questions": ({**GOOD, "prompt": "What?"}, "both"),
    "a missing image": ({**GOOD, "image": "b.png"}, "no file exists at"),
    "two messages": ({**GOOD, "chosen": [QUESTION, {"from": "gpt", "value": YES}]}, "2 messages under 'chosen'"),
    "a margin in words": ({**GOOD, "margin": "much"}, "'much' under 'margin', expected a number"),
    "a mark in an answer": ({**GOOD, "chosen": "<image> yes"}, "<image>"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_record_is_left_out_with_the_reason(tmp_path, tokenizer, name):
    record, reason = BAD[name]
    dataset = opened(tmp_path, [GOOD, record], tokenizer)
    (found,) = dataset.rejections()
    assert len(dataset) == 1 and reason in found["reason"]


def test_a_margin_goes_with_the_chosen_answer(tmp_path, tokenizer):
    dataset = opened(tmp_path, [GOOD, {**GOOD, "margin": 2}], tokenizer)
    first, second = (collate(list(dataset[i].samples), dataset.image_options).extra for i in (0, 1))
    assert first == {} and second["margin"].tolist() == [2.0, 0.0]


def test_conversations_are_no_preferences(tmp_path, tokenizer):
    record = {"conversations": [QUESTION, {"from": "gpt", "value": YES}], "image": "a.png"}
    with pytest.raises(ConfigError, match="chosen and a rejected answer"):
        opened(tmp_path, [record], tokenizer)
