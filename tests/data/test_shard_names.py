"""Members of WebDataset shards make the records that their names mean, whatever their order."""

import io
import json
import tarfile
from pathlib import Path

import pytest
from PIL import Image

from llava_ds.constants import ConfigError, DataError
from llava_ds.data.sources import Source, SourceOptions, open_sources, parse_columns, to_sample

TALK = [{"from": "human", "value": "<image>\nWhat?"}, {"from": "gpt", "value": "A boat."}]


def png(width: int) -> bytes:
    """The width tells which image it is."""
    file = io.BytesIO()
    Image.new("RGB", (width, 3), "blue").save(file, "PNG")
    return file.getvalue()


def opened(folder: Path, *members: tuple[str, object], columns: str = "") -> Source:
    with tarfile.open(folder / "a.tar", "w") as tar:
        for name, data in members:
            data = data if isinstance(data, bytes) else (data if isinstance(data, str) else json.dumps(data)).encode()
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    options = SourceOptions(cache_dir=str(folder / "cache"), columns=parse_columns(columns))
    [source] = open_sources(str(folder / "a.tar"), options)
    return source


def read(source: Source) -> list[tuple[str, str, list[int]]]:
    """Id, answer and widths of the images of every record."""
    found = []
    for record in source.read():
        sample = to_sample(record.text, source, record.index)
        images = []
        for ref in (ref for media in sample.media for ref in media.refs):
            data = Path(ref.path).read_bytes()[ref.offset : ref.offset + ref.num_bytes]
            images.append(Image.open(io.BytesIO(data)).width)
        found.append((sample.id, sample.messages[-1].text, images))
    return found


def rejected(source: Source, number: int) -> str:
    record = list(source.read())[number]
    with pytest.raises(DataError) as caught:
        to_sample(record.text, source, number)
    return str(caught.value)


@pytest.mark.parametrize(
    ("members", "expected"),
    [
        (  # dots in the names
            [("img_0.5.jpg", png(1)), ("img_0.5.txt", "half"), ("img_0.75.jpg", png(2)), ("img_0.75.txt", "more")],
            [("img_0.5", "half", [1]), ("img_0.75", "more", [2])],
        ),
        (  # versions, with a json, and the texts in front
            [("v1.2.a.json", {"conversations": TALK}), ("v1.3.a.json", {"conversations": TALK})]
            + [("v1.3.a.png", png(3)), ("v1.2.a.png", png(2))],
            [("v1.2.a", "A boat.", [2]), ("v1.3.a", "A boat.", [3])],
        ),
        (  # an image of each with a number behind its own name
            [
                ("x_0.5.txt", "a"),
                ("x_0.5.1.png", png(2)),
                ("x_0.5.0.png", png(1)),
                ("x_0.6.txt", "b"),
                ("x_0.6.png", png(3)),
            ],
            [("x_0.5", "a", [1, 2]), ("x_0.6", "b", [3])],
        ),
        (  # a key up to the first dot, as WebDataset has it
            [("k.left.png", png(1)), ("k.right.png", png(2)), ("k.txt", "both"), ("m.png", png(3)), ("m.txt", "one")],
            [("k", "both", [1, 2]), ("m", "one", [3])],
        ),
        ([("k.input.png", png(1)), ("k.output.txt", "out")], [("k", "out", [1])]),
        ([("k.jpg.png", png(1)), ("k.jpg.txt", "a")], [("k.jpg", "a", [1])]),
        (  # in natural order
            [(f"k.{number}.png", png(number)) for number in (10, 2, 1)] + [("k.txt", "three")],
            [("k", "three", [1, 2, 10])],
        ),
        (
            [("k.png", png(9)), ("k.img2.png", png(2)), ("k.img10.png", png(10)), ("k.txt", "a")],
            [("k", "a", [9, 2, 10])],
        ),
        (  # not beside each other
            [("a.png", png(1)), ("b.png", png(2)), ("c.png", png(3)), ("b.txt", "b"), ("a.txt", "a"), ("c.txt", "c")],
            [("a", "a", [1]), ("b", "b", [2]), ("c", "c", [3])],
        ),
        (  # the same names in folders
            [("x/1.png", png(1)), ("y/1.png", png(2)), ("y/1.txt", "y"), ("x/1.txt", "x"), ("x.y/1.0.png", png(3))]
            + [("x.y/1.txt", "z")],
            [("x/1", "x", [1]), ("y/1", "y", [2]), ("x.y/1", "z", [3])],
        ),
        ([("k.json", TALK), ("k.png", png(1))], [("k", "A boat.", [1])]),
        ([("k.json", [{"user": "What?", "assistant": "A boat."}]), ("k.png", png(1))], [("k", "A boat.", [1])]),
        ([("k.conversations.json", TALK), ("k.png", png(1))], [("k", "A boat.", [1])]),
        ([("k.conversations.json", {"conversations": TALK}), ("k.png", png(1))], [("k", "A boat.", [1])]),
        (
            [("k.messages.json", {"role": ["user", "assistant"], "content": ["What?", "A boat."]})],
            [("k", "A boat.", [])],
        ),
        (
            [("k.json", {"id": 7}), ("k.texts.json", [{"user": "a", "assistant": "b"}]), ("k.png", png(1))],
            [("7", "b", [1])],
        ),
        ([("k.question.txt", "What?"), ("k.answer.txt", "A boat.\n"), ("k.png", png(1))], [("k", "A boat.", [1])]),
        ([("k.prompt.json", [{"role": "user", "content": "Q"}]), ("k.completion.txt", "A")], [("k", "A", [])]),
        (
            [("k.jpg", png(1)), ("k.json", {"caption": "a", "url": "u"}), ("k.txt", "a\n"), ("k.cls", "3")],
            [("k", "a", [1])],
        ),
        (  # the order that a record gives counts
            [("k.1.png", png(1)), ("k.2.png", png(2)), ("k.json", {"images": ["k.2.png", "k.1.png"], "text": "a"})],
            [("k", "a", [2, 1])],
        ),
    ],
)
def test_records_are_what_names_mean(tmp_path, members, expected):
    assert read(opened(tmp_path, *members)) == expected
    assert sorted(read(opened(tmp_path, *reversed(members)))) == sorted(expected)


@pytest.mark.parametrize("named", ["{}", "k.{}", "x/k.{}", "elsewhere/k.{}"])
def test_images_stand_in_the_order_that_the_record_names_them_in(tmp_path, named):
    """By the names that members have behind the key, too."""
    talk = [{"from": "human", "value": "<image> <image>"}, {"from": "gpt", "value": "ok"}]
    record = {"images": [named.format("b.png"), named.format("a.png")], "conversations": talk}
    source = opened(tmp_path, ("x/k.a.png", png(1)), ("x/k.b.png", png(2)), ("x/k.json", record))
    assert read(source) == [("x/k", "ok", [2, 1])]
    assert read(
        opened(tmp_path, ("k.1.png", png(1)), ("k.2.png", png(2)), ("k.json", {**record, "images": ["c", "d"]}))
    )[0][2] == [1, 2]


def test_two_captions_that_differ_are_asked_about(tmp_path):
    members = [("k.jpg", png(1)), ("k.txt", "alt text"), ("k.json", {"caption": "a boat at sea", "url": "u"})]
    with pytest.raises(ConfigError, match="have 'text' and 'caption', and either could be the text: name one with"):
        opened(tmp_path, *members)
    assert read(opened(tmp_path, *members, columns="text=caption"))[0][1] == "a boat at sea"
    assert read(opened(tmp_path, *members, columns="text=text"))[0][1] == "alt text"
    members[2] = ("k.json", {"text": "a boat at sea"})
    with pytest.raises(ConfigError, match=r"its \.txt and the 'text' of its \.json differ"):
        opened(tmp_path, *members)
    assert read(opened(tmp_path, *members, columns="text=txt"))[0][1] == "alt text"
    talk = [("k.jpg", png(1)), ("k.txt", "alt text"), ("k.json", {"caption": "c", "conversations": TALK})]
    assert read(opened(tmp_path, *talk))[0][1] == "A boat."  # where no caption is learned


GOOD = [("0.png", png(1)), ("0.txt", "good"), ("1.png", png(1)), ("1.txt", "good")]


@pytest.mark.parametrize(
    ("members", "reason"),
    [
        (
            [("k.png", png(1)), ("k.cls", "3")],
            "the key 'k' has a class (.cls) and no text to learn: add a .txt or .json",
        ),
        (
            [("i_0.5.png", png(1)), ("i_0.5.txt", "half"), ("i_0.75.png", png(2))],
            "the key 'i_0' has an image of another name than its text: 'i_0.75.png', not 'i_0.5.txt'",
        ),
        ([("k.a.txt", "a"), ("k.b.txt", "b"), ("k.png", png(1))], "the key 'k' has several .json or .txt members"),
        ([("k.png", png(1)), ("k.json", [1])], "its .json is a list, expected an object or a list of turns"),
        ([("k.png", png(1)), ("k.json", "7")], "its .json is a int, expected an object or a list of turns"),
        ([("k.png", png(1)), ("k.json", "{")], "its .json or .txt can't be read"),
        ([("k.png", png(1)), ("k.json", {"llava_ds_rejected": "mine"})], "mine"),
    ],
)
def test_the_reason_of_a_bad_record_is_kept_and_no_key_of_our_own_shown(tmp_path, members, reason):
    assert reason in rejected(opened(tmp_path, *GOOD, *members), 2)
    with pytest.raises(ConfigError) as caught:
        opened(tmp_path, *members)
    assert f"none of its first records can be used; the first: {reason}" in str(caught.value)
    assert "llava_ds" not in str(caught.value).replace(str(tmp_path), "")


def test_a_question_alone_is_no_caption(tmp_path):
    with pytest.raises(ConfigError, match="has a question under 'question' and no answer"):
        opened(tmp_path, ("k.png", png(1)), ("k.question.txt", "What?"))
