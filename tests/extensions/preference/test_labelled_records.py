"""Answers with a label become samples for KTO, pairs become two; what has no label is refused with the reason."""

import json
from pathlib import Path

import numpy as np
import pytest
import toys
from PIL import Image

from llava_ds.constants import IGNORE_INDEX, ConfigError
from llava_ds.data.collate import LoadedPair, LoadedSample
from llava_ds.data.dataset import EncodedDataset, PreflightOptions, open_encoded
from llava_ds.data.sources import SourceOptions, open_sources
from llava_ds.extensions.preference.kto import Mismatched, label_answers

YES, TWO, ASKED = "yes", "It is a red cat.", "<image>\nWhat is it?"
PARTS = [{"type": "image"}, {"type": "text", "text": "What is it?"}]
TURNS = [{"role": "user", "content": ASKED}, {"role": "assistant", "content": YES}]
FORMS = {
    "TRL, texts": {"images": ["a.png"], "prompt": ASKED, "completion": YES, "label": True},
    "TRL, messages": {
        "images": ["a.png"],
        "prompt": [{"role": "user", "content": PARTS}],
        "completion": [{"role": "assistant", "content": [{"type": "text", "text": YES}]}],
        "label": True,
    },
    "ms-swift": {"images": ["a.png"], "messages": TURNS, "label": True},
    "ms-swift, query": {"images": ["a.png"], "query": ASKED, "response": YES, "label": True},
    "a table": {"image": "a.png", "question": ASKED, "answer": YES, "label": "True", "kind": "x"},
    "LLaMA-Factory": {"images": ["a.png"], "messages": TURNS, "kto_tag": True},
    "alpaca": {"images": ["a.png"], "instruction": ASKED, "output": YES, "kto_tag": "true"},
    "LLaVA": {
        "image": "a.png",
        "conversations": [{"from": "human", "value": ASKED}, {"from": "gpt", "value": YES}],
        "label": 1,
    },
}
PAIR = {"image": "a.png", "prompt": ASKED, "chosen": TWO, "rejected": "no"}


def opened(folder: Path, records: list[dict], tokenizer, labelled: bool = True) -> EncodedDataset:
    folder.mkdir(exist_ok=True)
    Image.new("RGB", (30, 20), "red").save(folder / "a.png")
    (folder / "data.json").write_text(json.dumps(records))
    options = SourceOptions(
        image_folder=str(folder), cache_dir=str(folder / "cache"), are_preferences=True, are_labelled=labelled
    )
    return open_encoded(
        open_sources(str(folder / "data.json"), options),
        tokenizer,
        toys.encoding_options(supervise_last_turn_only=True),
        toys.image_options(),
        PreflightOptions(cache_dir=str(folder / "cache"), on_bad_sample="list"),
    )


def answer(sample: LoadedSample) -> list[int]:
    return sample.input_ids[sample.labels != IGNORE_INDEX].tolist()


@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_an_answer_with_a_label(form, tmp_path, tokenizer):
    key = "kto_tag" if "kto_tag" in FORMS[form] else "label"
    data = opened(tmp_path, [FORMS[form], {**FORMS[form], key: False}], tokenizer)
    label_answers(data)
    good, bad = data[0], data[1]
    pair = opened(tmp_path / "pair", [{**PAIR, "chosen": YES}], tokenizer, labelled=False)[0]
    for sample in (good, bad):
        assert isinstance(sample, LoadedSample) and len(sample.media) == 1
        assert sample.input_ids.tolist() == pair.chosen.input_ids.tolist()
        assert sample.labels.tolist() == pair.chosen.labels.tolist()
    assert [sample.extra["label"] for sample in (good, bad)] == [1.0, -1.0]
    assert "2 answers" not in data.summary()[1] and "0 answers in pairs, 2 alone" in "".join(data.summary())


def test_pairs_are_two_answers_and_may_be_among_single_ones(tmp_path, tokenizer):
    data = opened(tmp_path, [PAIR, {**FORMS["TRL, texts"], "label": False}, PAIR], tokenizer)
    label_answers(data)
    items = [data[i] for i in range(3)]
    assert [type(item) for item in items] == [LoadedPair, LoadedSample, LoadedPair]
    numbers = [[sample.extra[name] for item in items for sample in item.samples] for name in ("label", "weight")]
    assert numbers == [[1.0, -1.0, -1.0, 1.0, -1.0], [0.5, 0.5, 1.0, 0.5, 0.5]]
    assert [sample.extra["share"] for sample in items[0].samples] == [3 / 2, 3 / 3]


def test_a_mismatched_prompt_has_the_answer_before_it(tmp_path, tokenizer):
    other = {**FORMS["TRL, texts"], "prompt": "Hm?", "completion": TWO, "label": False}
    del other["images"]
    data = opened(tmp_path, [FORMS["TRL, texts"], other, PAIR], tokenizer)
    label_answers(data)
    data.shares_prompts = True
    data.of_answers["reference"] = np.zeros((3, 2))
    mismatched = Mismatched.of(data, 512)
    assert "reference" not in mismatched.of_answers and mismatched.fingerprint != data.fingerprint
    for i in range(3):
        own, before, found = data[i].samples, data[i - 1].samples, mismatched[i].samples
        assert len(found) == len(own)
        for k, sample in enumerate(found):
            begin = len(own[k].input_ids) - len(answer(own[k]))
            assert sample.input_ids[:begin].tolist() == own[k].input_ids[:begin].tolist()
            assert answer(sample) == answer(before[min(k, len(before) - 1)])
            assert len(sample.media) == len(own[k].media) and sample.shared == own[k].shared
    assert len(Mismatched.of(data, 20)[0].input_ids) == 20


def test_what_has_no_label_is_refused(tmp_path, tokenizer):
    records = [FORMS["TRL, texts"], {**FORMS["TRL, texts"], "label": "good"}, {"prompt": "a", "completion": "b"}]
    reasons = [row["reason"] for row in map(opened(tmp_path, records, tokenizer).row, range(3))]
    assert reasons[0] is None or reasons[0] == ""
    assert reasons[1].startswith("has 'good' under 'label', expected true or false for its only answer")
    assert reasons[2].startswith("has None under 'label', expected true or false")
    with pytest.raises(ConfigError, match=r"a chosen and a rejected answer, or an answer with a label .*kto_tag"):
        opened(tmp_path / "none", [{"prompt": "a", "completion": "b"}], tokenizer)
    with pytest.raises(ConfigError, match="no answer: name it with --data_columns answer=reply"):
        opened(tmp_path / "reply", [{"question": "a", "reply": "b", "label": True}], tokenizer)
    with pytest.raises(ConfigError, match=r"(?s)none of its first records has a chosen.*--data_columns chosen=NAME"):
        opened(tmp_path / "dpo", [FORMS["TRL, texts"]], tokenizer, labelled=False)
