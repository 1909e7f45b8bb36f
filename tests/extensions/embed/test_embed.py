"""Records, data sets and the loss of embeddings."""

import json

import pytest
import torch
import toys

from llava_ds.constants import DataError
from llava_ds.data.unlearned_answer import code_of
from llava_ds.extensions.active import OF_OBJECTIVE
from llava_ds.extensions.embed.embed import Candidates, Embedding
from llava_ds.extensions.embed.extension import Groups
from llava_ds.extensions.embed.part_records import PART, PartField

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
        ({"anchor": "q", "positive": 3}, "has 3 as positive, expected text"),
    ],
)
def test_a_record_without_its_parts_is_refused(record, reason):
    with pytest.raises(DataError, match=reason):
        PartField().convert(record)


def opened(folder, tokenizer, records: list[dict]):
    """The records as a data set."""
    path = folder / f"{len(list(folder.iterdir()))}.json"
    path.write_text(json.dumps(records))
    OF_OBJECTIVE["embed"] = PartField()
    try:
        encoding = toys.encoding_options(supervise_last_turn_only=True)
        given = {"cache_dir": folder / "cache", "encoding": encoding, "num_workers": 1, "on_bad_sample": "list"}
        return toys.encoded(str(path), None, tokenizer=tokenizer, **given)
    finally:
        OF_OBJECTIVE.clear()


def test_a_sample_is_a_query_with_its_other_parts(tmp_path, tokenizer):
    """A record whose part is rejected is left out as a whole."""
    records = [{"anchor": f"q{i}", "positive": f"p {i}", **({"negative": "no"} if i % 2 else {})} for i in range(5)]
    records[2]["positive"] = {"text": "p", "image": "missing.png"}
    plain = opened(tmp_path, tokenizer, records)
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
