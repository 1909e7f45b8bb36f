"""Records, flags and refusals of classification."""

import json
import types

import pytest
import torch
import toys

from llava_ds.config.parsing import parse_arguments
from llava_ds.constants import ConfigError, DataError
from llava_ds.data.unlearned_answer import code_of
from llava_ds.extensions.active import OF_OBJECTIVE
from llava_ds.extensions.classify.extension import check_labels
from llava_ds.extensions.classify.flags import Flags, names_of
from llava_ds.extensions.classify.label_records import CLASS, LabelField
from llava_ds.runtime.ranks import Ranks

RANKS = Ranks(0, 0, 1, torch.device("cpu"))


def test_a_label_becomes_an_answer_that_is_not_learned():
    convert = LabelField().convert
    assert convert({"messages": [{"role": "user", "content": "?"}], "label": 2}) == {
        "messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "2"}], CLASS: ["2"],
    }  # fmt: skip
    assert convert({"prompt": "?", "label": ["a", "b"]}) == {"prompt": "?", "answer": "a, b", CLASS: ["a", "b"]}
    shown = convert({"image": "1.png", "label": False})
    assert shown[CLASS] == ["false"] and [turn["content"] for turn in shown["messages"]] == ["", "false"]
    assert LabelField().load({CLASS: ["a", "b"]})[CLASS].tolist() == [code_of("a"), code_of("b")]


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"prompt": "?"}, "has no 'label'"),
        ({"prompt": "?", "label": 0.5}, "has 0.5 under 'label', expected text"),
        ({"prompt": "?", "label": ["a", {}]}, r"has \{\} under 'label'"),
        ({"messages": [{"role": "assistant", "content": "!"}], "label": 1}, "ends with the model's answer"),
    ],
)
def test_a_bad_record_is_refused(record, reason):
    with pytest.raises(DataError, match=reason):
        LabelField().convert(record)


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ({}, r"needs two labels or more, but --labels has \[\]"),
        ({"labels": "cat"}, r"needs two labels or more, but --labels has \['cat'\]"),
        ({"labels": "cat,dog,cat"}, "cat more than once"),
        ({"labels": "cat,dog", "lora_enable": True}, "adapter's folder can't contain it"),
        ({"labels": "cat,dog", "sequence_parallel_size": 2}, "all tokens of a sample on one rank"),
        ({"labels": "cat,dog", "pipeline_parallel_size": 2}, "all layers on every rank"),
    ],
)
def test_a_wrong_flag_is_refused(flags, reason):
    given = {"output_dir": "out", "deepspeed_config": "zero2", "objective": "classify", "data_path": __file__, **flags}
    with pytest.raises(ConfigError, match=reason):
        parse_arguments([word for name, value in given.items() for word in (f"--{name}", str(value))])


def test_labels_come_from_a_file(tmp_path):
    (tmp_path / "labels.txt").write_text("red cat\ndog, small\n")
    flags, _ = Flags(labels=str(tmp_path / "labels.txt")).converted()
    assert names_of(flags) == ["red cat", "dog, small"]


def opened(folder, tokenizer, records: list[dict]):
    """The records as a data set."""
    path = folder / f"{len(list(folder.iterdir()))}.json"
    path.write_text(json.dumps(records))
    OF_OBJECTIVE["classify"] = LabelField()
    try:
        encoding = toys.encoding_options(supervise_last_turn_only=True)
        given = {"cache_dir": folder / "cache", "encoding": encoding, "num_workers": 1, "on_bad_sample": "list"}
        return toys.encoded(str(path), None, tokenizer=tokenizer, **given)
    finally:
        OF_OBJECTIVE.clear()


def test_labels_of_the_data_are_compared_with_the_flag(tmp_path, tokenizer, capsys):
    def check(*labels_of: list, **flags: object) -> None:
        records = [[{"prompt": f"q{i}", "label": one} for i, one in enumerate(each)] for each in labels_of]
        data = [opened(tmp_path, tokenizer, each) for each in records]
        own = {"classify": Flags(**{"labels": "cat,dog,7", **flags})}
        evals = types.SimpleNamespace(eval_set=data[1] if len(data) > 1 else None)
        check_labels(types.SimpleNamespace(args=types.SimpleNamespace(own=own), data_sets=data, evals=evals), RANKS)

    check(["cat", 7, "cat"])
    assert "labels of the training data: cat 2, 7 1; 1 of --labels have no record" in capsys.readouterr().out
    with pytest.raises(DataError, match=r"\.json:\d+ in the held-out data has the label 'cow', which is not among"):
        check(["cat", 7], ["cat", "cow"])
    with pytest.raises(DataError, match="all records of the training data have the label 'cat'"):
        check(["cat", "cat"])
    with pytest.raises(DataError, match="has 2 labels: give --problem_type multi_label_classification"):
        check(["cat", ["cat", "dog"]])
    check([["cat", "dog"], []], problem_type="multi_label_classification")
