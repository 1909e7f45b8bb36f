"""Records mutated in every way, in every format: a sample or a reason, and nothing else."""

import copy
import json
import random
import string

import pytest

from llava_ds.constants import DataError
from llava_ds.data.sample import Sample
from llava_ds.data.sources import Source, SourceOptions, open_sources, to_sample

PART = {"type": "image_url", "image_url": {"url": "a.png"}}
RECORDS = {
    "llava": {
        "id": "1",
        "image": ["a.png", "b.png"],
        "conversations": [
            {"from": "human", "value": "<image>\nWhat? <image>"},
            {"from": "gpt", "value": "A cat."},
            {"from": "human", "value": "Sure?"},
            {"from": "gpt", "value": "Yes."},
        ],
    },
    "video": {
        "id": 2,
        "video": ["a.png", "b.png"],
        "conversations": [{"from": "human", "value": "<image>\nWhat?"}, {"from": "gpt", "value": "A cat."}],
    },
    "sharegpt": {
        "images": ["a.png"],
        "videos": [],
        "system": "Be brief.",
        "conversations": [{"from": "user", "value": "What?"}, {"from": "assistant", "value": "A cat."}],
    },
    "messages": {
        "images": ["b.png"],
        "messages": [
            {"role": "system", "content": "Be kind."},
            {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What?"}, PART]},
            {"role": "assistant", "content": "A cat."},
        ],
    },
    "caption": {"id": 3.5, "image": "a.png", "text": "A cat."},
}
JUNK = [
    *[None, True, 0, -1, 10**400, 1.5, float("nan"), float("inf"), "", " ", "\0", "\ud800", "\udcff", "🦙" * 50],
    *["<image>", "<video>", "<image>" * 40, "../a.png", "/etc/passwd", "file:///etc/passwd", "http://x/a.png", "."],
    *["data:image/png;base64,=", "..", "a.png/", "x" * 5000, "a/" * 3000, "a.png\0", "a.png", "~", "-", [], {}, [[]]],
    *[[None], [[["a.png"]]], [3], {"path": "a.png"}, {"path": 3}, {"bytes": "x"}, {"url": {}}, {"": ""}],
    *[{"llava_ds_file": "/etc/passwd", "offset": 0, "num_bytes": 5}, {"llava_ds_rejected": []}, {"from": "human"}],
    *[{"type": "image"}, {"role": ["x"], "content": []}],
]


def mutate(record: object, rng: random.Random) -> str:
    """The text of a record with some of its places replaced, dropped, repeated or nested, or the text itself broken."""
    record = json.loads(json.dumps(record))
    for _ in range(rng.choice([1, 1, 1, 2, 3, 6])):
        places = [(record, key) for key in record]
        for holder, key in places:
            if isinstance(holder[key], (dict, list)):
                inner = holder[key]
                places += [(inner, k) for k in (inner if isinstance(inner, dict) else range(len(inner)))]
        if not places:
            break
        holder, key = rng.choice(places)
        action = rng.randrange(7)
        if action <= 2:
            holder[key] = copy.deepcopy(rng.choice(JUNK))
        elif action == 3:
            del holder[key]
        elif action == 4 and isinstance(holder, dict):
            holder[rng.choice([key + "x", "images", "image", "video", "messages", "system", "id", "kind"])] = (
                holder.pop(key)
            )
        elif action == 5:
            holder[key] = [holder[key]] * rng.choice([1, 2, 5])
        elif isinstance(holder[key], str):
            at = rng.randrange(len(holder[key]) + 1)
            holder[key] = (
                holder[key][:at] + rng.choice(["\ud83d", "<image>", "\0", "\n", "é", "/../"]) + holder[key][at:]
            )
    text = json.dumps(record, ensure_ascii=rng.random() < 0.7)
    if rng.random() < 0.25:
        at = rng.randrange(len(text))
        broken = [
            "",
            rng.choice(string.printable),
            "[" * 5000,
            '{"a":' * 2000,
            "9" * 5000,
            "\\u0000",
            "\\ud800",
            "\ud800",
            "NaN",
        ]
        text = text[:at] + rng.choice(broken) + text[at + rng.choice([0, 0, 1, 9]) :]
    return text


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> dict[str, Source]:
    """A source for every kind of record, with two pictures and a video beside them."""
    folder = tmp_path_factory.mktemp("fuzz")
    for name in ("a.png", "b.png"):
        (folder / name).write_bytes(b"a picture")
    found = {}
    for name, record in RECORDS.items():
        path = folder / f"{name}.jsonl"
        path.write_text(json.dumps(record) + "\n")
        (found[name],) = open_sources(str(path), SourceOptions(image_folder=str(folder), cache_dir=str(folder / "c")))
    return found


def check(text: str, source: Source) -> bool:
    """Whether a record was accepted; its sample or its reason is whole."""
    try:
        sample = to_sample(text, source, 0)
    except DataError as error:
        assert str(error).strip() and len(str(error)) < 6000
        str(error).encode()
        return False
    assert isinstance(sample, Sample) and sample.messages
    repr(sample).encode()
    sample.id.encode()
    marks = sum(message.text.count("<image>") for message in sample.messages)
    assert marks == len(sample.media) and all(media.refs for media in sample.media)
    assert all(ref.path.startswith(source.image_root) for media in sample.media for ref in media.refs)
    assert all(message.role in ("system", "human", "gpt") for message in sample.messages)
    return True


@pytest.mark.parametrize("name", RECORDS)
def test_a_mutated_record_is_a_sample_or_has_a_reason(sources, name):
    rng = random.Random(name)
    assert check(json.dumps(RECORDS[name]), sources[name])
    outcomes = [check(mutate(RECORDS[name], rng), sources[name]) for _ in range(600)]
    assert 0 < sum(outcomes) < 500


@pytest.mark.parametrize("name", RECORDS)
def test_a_mutated_file_loses_no_record(sources, name, tmp_path):
    """Accepted and rejected are as many as the lines, also where the records hold embedded pictures."""
    rng = random.Random(name)
    texts = [mutate(RECORDS[name], rng).replace("\n", " ") for _ in range(150)]
    path = tmp_path / "a.jsonl"
    lines = [json.dumps(RECORDS[name]), *texts, '{"image": "data:image/png;base64,AAAA"}']
    path.write_bytes("".join(line + "\n" for line in lines).encode("utf-8", "surrogatepass"))
    options = SourceOptions(image_folder=sources[name].image_root, cache_dir=str(tmp_path / "c"))
    for last in (len(lines), len(lines) - 1):
        (source,) = open_sources(str(path), options)
        records = list(source.read())
        assert [record.line for record in records] == list(range(1, last + 1))
        assert any([check(record.text, source) for record in records])
        path.write_bytes(b"\n".join(path.read_bytes().split(b"\n")[: len(lines) - 1]))
