"""Records, flags and refusals of heads."""

import json
import types

import pytest
import torch
import toys

from llava_ds.config.parsing import parse_arguments
from llava_ds.constants import ConfigError, DataError
from llava_ds.extensions.active import OF_OBJECTIVE
from llava_ds.extensions.heads.embed import Candidates, Embedding
from llava_ds.extensions.heads.extension import check_labels
from llava_ds.extensions.heads.flags import Flags, names_of
from llava_ds.extensions.heads.groups import Groups
from llava_ds.extensions.heads.head_records import CLASS, PART, LabelField, PartField, code_of
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
        ({"prompt": "?", "label": 0.5}, "has 0.5 under 'label', expected a text"),
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


def opened(folder, tokenizer, objective: str, records: list[dict]):
    """The records as a data set."""
    path = folder / f"{len(list(folder.iterdir()))}.json"
    path.write_text(json.dumps(records))
    OF_OBJECTIVE[objective] = Flags().traits(objective).fields
    try:
        encoding = toys.encoding_options(supervise_last_turn_only=True)
        given = {"cache_dir": folder / "cache", "encoding": encoding, "num_workers": 1, "on_bad_sample": "list"}
        return toys.encoded(str(path), None, tokenizer=tokenizer, **given)
    finally:
        OF_OBJECTIVE.clear()


def test_labels_of_the_data_are_compared_with_the_flag(tmp_path, tokenizer, capsys):
    def check(*labels_of: list, **flags: object) -> None:
        records = [[{"prompt": f"q{i}", "label": one} for i, one in enumerate(each)] for each in labels_of]
        data = [opened(tmp_path, tokenizer, "classify", each) for each in records]
        own = {"heads": Flags(**{"labels": "cat,dog,7", **flags})}
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


ASKED = [{"role": "user", "content": "q"}]
FORMS = [
    {"anchor": "q", "positive": "p", "negative": "n"},
    {
        "messages": ASKED,
        "positive_messages": [[{"role": "user", "content": "p"}]],
        "negative_messages": [[{"role": "user", "content": "n"}]],
    },
    {"anchor": {"text": "q"}, "positive": {"text": "p"}, "negative_1": "n"},
]


def test_a_record_becomes_its_parts():
    for record in FORMS:
        made = PartField().convert({"id": "a", **record})
        assert [one["messages"][0]["content"] for one in made] == ["q", "p", "n"]
        assert [one[PART][0] for one in made] == [3, 0, 0] and len({one[PART][1] for one in made}) == 3
        assert len({one[PART][2] for one in made}) == 1 and all(one["id"] == "a" for one in made)
    shown = PartField().convert({
        "messages": ASKED, "images": ["1.png"], "positive_messages": [ASKED], "positive_images": [["2.png"]],
    })  # fmt: skip
    assert [one["images"] for one in shown] == [["1.png"], ["2.png"]]
    assert [one["messages"][-1]["role"] for one in shown] == ["assistant"] * 2


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"anchor": "q"}, "has 0 parts for its positive, expected one"),
        ({"anchor": "q", "positive": ["a", "b"]}, "has 2 parts for its positive, .* a record for each positive"),
        ({"positive": "p"}, "has 0 parts for its query"),
        ({"anchor": "q", "positive": 3}, "has 3 as positive, expected a text"),
    ],
)
def test_a_record_without_its_parts_is_refused(record, reason):
    with pytest.raises(DataError, match=reason):
        PartField().convert(record)


def test_a_sample_is_a_query_with_its_other_parts(tmp_path, tokenizer):
    """A record whose part is rejected is left out as a whole."""
    records = [{"anchor": f"q{i}", "positive": f"p {i}", **({"negative": "no"} if i % 2 else {})} for i in range(5)]
    records[2]["positive"] = {"text": "p", "image": "missing.png"}
    plain = opened(tmp_path, tokenizer, "embed", records)
    data = Groups.of(plain)
    assert len(plain) == 11 and len(data) == 4
    assert data.counts() == ["4 queries; 12 parts of records, 1 rejected; 1 records are left out with a rejected part"]
    OF_OBJECTIVE["embed"] = PartField()
    loaded = [data[i].samples for i in range(4)]
    OF_OBJECTIVE.clear()
    assert [len(each) for each in loaded] == [2, 3, 3, 2]
    assert data.lengths.tolist() == [sum(len(one.input_ids) for one in each) for each in loaded]
    rest, held_out = data.without_part(0.5, 0)
    assert len(rest) == len(held_out) == 2 and sorted([*rest.lengths, *held_out.lengths]) == sorted(data.lengths)


def test_equal_positives_are_no_negatives():
    """Loss and gradients are those of a loop over queries."""
    q, p, n = "q", "p", "n"
    texts = [q, p, n, "r", p, "s", "t", q, "u"]  # the second query has the first's positive, the fourth is the first
    starts = [3, 0, 0, 2, 0, 2, 0, 2, 0]
    query = [q, q, q, "r", "r", "s", "s", q, q]
    parts = torch.tensor([[a, code_of(b), code_of(c)] for a, b, c in zip(starts, texts, query)])
    vectors = torch.nn.functional.normalize(torch.randn(9, 4, dtype=torch.float64), dim=1).requires_grad_()
    objective = Embedding(1, 1, temperature=0.1)
    losses, is_right, number = objective.compare(vectors, Candidates(parts))
    losses.sum().backward()
    wanted = {0: [1, 2, 6], 3: [4, 2, 6, 8], 5: [6, 1, 2, 4, 8], 7: [8, 2, 4, 6]}
    own = vectors.detach().requires_grad_()
    each = {i: -((own[js] @ own[i]) / 0.1).log_softmax(0)[0] for i, js in wanted.items()}
    torch.stack(list(each.values())).sum().backward()
    assert [losses[i].item() for i in wanted] == pytest.approx([x.item() for x in each.values()], rel=1e-12)
    assert torch.allclose(vectors.grad, own.grad, rtol=1e-10)
    assert losses[[1, 2, 4, 6, 8]].eq(0).all() and [int(number[i]) for i in wanted] == [3, 4, 5, 4]
    assert [bool(is_right[i]) for i in wanted] == [int((own[js] @ own[i]).argmax()) == 0 for i, js in wanted.items()]
