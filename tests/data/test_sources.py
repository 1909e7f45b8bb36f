"""What is wrong with a data file is said once, with the record's number and what was expected."""

import json
import os
from pathlib import Path

import pytest

from llava_ds.constants import DataError
from llava_ds.data.sample import Message
from llava_ds.data.sources import MAX_SHOWN, Sample, read_samples

TALK = [{"from": "human", "value": "<image>\nWhat?"}, {"from": "gpt", "value": "A cat."}]
TEXT_ONLY = [{"from": "human", "value": "Who?"}, {"from": "gpt", "value": "Me."}]


@pytest.fixture
def folder(tmp_path) -> Path:
    """An image folder with a picture, and a picture beside it that is out of bounds."""
    images = tmp_path / "images"
    (images / "sub").mkdir(parents=True)
    (tmp_path / "images-of-others").mkdir()
    for path in (
        images / "a.png",
        images / "sub" / "b.png",
        tmp_path / "secret.png",
        tmp_path / "images-of-others/a.png",
    ):
        path.write_bytes(b"a picture")
    os.symlink(tmp_path / "secret.png", images / "link.png")
    os.symlink(images / "a.png", images / "inner.png")
    return images


def read(folder: Path, records: object, image_folder: object = "") -> list[Sample]:
    path = folder.parent / "data.json"
    path.write_text(json.dumps(records))
    return read_samples(path, folder if image_folder == "" else image_folder)


def refused(folder: Path, records: object, image_folder: object = "") -> str:
    with pytest.raises(DataError) as caught:
        read(folder, records, image_folder)
    message = str(caught.value)
    assert message.startswith(str(folder.parent / "data.json"))
    return message


def test_samples_come_as_written_and_in_order(folder):
    samples = read(
        folder,
        [
            {"id": 7, "image": "a.png", "conversations": TALK},
            {"conversations": TEXT_ONLY, "kind": "colour"},
            {"id": "c", "image": ["sub/b.png", "inner.png"], "conversations": [*TALK, *TALK]},
        ],
    )
    assert [sample.id for sample in samples] == ["7", "1", "c"]
    assert samples[0].messages == (Message("human", "<image>\nWhat?"), Message("gpt", "A cat."))
    assert samples[0].images == (str(folder / "a.png"),)
    assert samples[1].images == () and samples[1].kind == "colour"
    assert samples[2].images == (str(folder / "sub" / "b.png"), str(folder / "a.png"))  # the link resolved


def test_a_file_without_pictures_needs_no_image_folder(folder):
    assert len(read(folder, [{"conversations": TEXT_ONLY}], None)) == 1


@pytest.mark.parametrize("content", [b"{", b"\xff\xfe\x00", None])
def test_what_is_no_json_is_refused(tmp_path, content):
    path = tmp_path / "data.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match="can't be read as JSON"):
        read_samples(path, None)


@pytest.mark.parametrize(
    ("records", "found"), [({"data": []}, "a dict"), ([], "an empty list"), ("text", "a str"), (None, "a NoneType")]
)
def test_what_is_no_list_of_records_is_refused(folder, records, found):
    message = refused(folder, records)
    assert f"holds {found}, expected LLaVA's format: a JSON list of records like" in message
    assert '{"id": "1", "image": "a.jpg", "conversations": [{"from": "human", "value": "<image>' in message


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ("text", "is a str, expected an object with 'conversations'"),
        ({"id": "1", "messages": []}, "has no list under 'conversations' (its keys: 'id', 'messages')"),
        ({}, "has no list under 'conversations' (its keys: none)"),
        ({"conversations": []}, "has no list under 'conversations'"),
        ({"conversations": ["hello"]}, "turn 0 is 'hello', expected {'from': 'human' or 'gpt', 'value': text}"),
        ({"conversations": [{"from": "human"}]}, "turn 0 is \"{'from': 'human'}\", expected"),
        ({"conversations": [{"from": "human", "value": 3}]}, "turn 0 is"),
        (
            {"conversations": [TEXT_ONLY[0], {"from": "assistant", "value": "x"}]},
            "turn 1 is from 'assistant', expected 'human' or 'gpt'",
        ),
        ({"conversations": TALK, "image": {"path": "a.png"}}, "under 'image', expected a path or a list of paths"),
        ({"conversations": TALK, "image": ["a.png", 3]}, "under 'image', expected a path or a list of paths"),
        ({"conversations": TALK}, "names 0 pictures under 'image', but its text has 1 <image> marks"),
        ({"conversations": TEXT_ONLY, "image": "a.png"}, "names 1 pictures under 'image', but its text has 0"),
        ({"conversations": TALK, "image": ["a.png", "a.png"]}, "names 2 pictures under 'image', but its text has 1"),
        ({"conversations": TALK, "image": "none.png"}, "names the picture 'none.png', but there is no file"),
        ({"conversations": TALK, "image": "sub"}, "names the picture 'sub', but there is no file"),
        ({"conversations": TALK, "image": "../secret.png"}, "'../secret.png', which lies outside the image folder"),
        ({"conversations": TALK, "image": "../images-of-others/a.png"}, "which lies outside the image folder"),
        ({"conversations": TALK, "image": "/etc/hostname"}, "'/etc/hostname', which lies outside the image folder"),
        ({"conversations": TALK, "image": "link.png"}, "'link.png', which lies outside the image folder"),
    ],
)
def test_a_record_that_can_not_be_used_is_named(folder, record, expected):
    message = refused(folder, [{"conversations": TEXT_ONLY}, record])
    assert "1 of 2 records can't be used" in message
    assert "record 1: " in message and expected in message
    assert "record 0: " not in message


def test_an_empty_list_under_image_means_no_picture_and_a_null_is_refused(folder):
    assert read(folder, [{"conversations": TEXT_ONLY, "image": []}])[0].images == ()
    assert "record 0: has None under 'image'" in refused(folder, [{"conversations": TEXT_ONLY, "image": None}])


@pytest.mark.parametrize("image", ["a\0.png", "\ud800.png"])
def test_a_path_that_no_file_can_have_is_refused(folder, image):
    assert "record 0: names the picture " in refused(folder, [{"conversations": TALK, "image": image}])


def test_half_a_surrogate_pair_is_refused_for_no_tokenizer_takes_it(folder):
    talk = [TEXT_ONLY[0], {"from": "gpt", "value": "cat \ud83d"}]
    assert "record 0: turn 1 " in refused(folder, [{"conversations": talk}])


def test_pictures_without_an_image_folder_ask_for_it(folder):
    message = refused(folder, [{"conversations": TALK, "image": "a.png"}], None)
    assert "names the picture 'a.png': give --image_folder" in message


@pytest.mark.parametrize("num_bad", [1, MAX_SHOWN, MAX_SHOWN + 1, 40])
def test_problems_are_counted_and_only_the_first_shown(folder, num_bad):
    message = refused(folder, [{"conversations": TEXT_ONLY}] * 3 + [{}] * num_bad)
    head, *lines = message.splitlines()
    assert head.endswith(f"{num_bad} of {num_bad + 3} records can't be used")
    assert sum(line.startswith("  record ") for line in lines) == min(num_bad, MAX_SHOWN)
    more = [line for line in lines if line.strip().startswith("and ")]
    assert more == ([f"  and {num_bad - MAX_SHOWN} more"] if num_bad > MAX_SHOWN else [])
