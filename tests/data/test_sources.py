"""What a record becomes, whichever format says it; what is wrong with one is said once, with what was expected."""

import json
import os
import pickle
from pathlib import Path

import pytest
from read_data import read_samples

from llava_ds.constants import ConfigError, DataError
from llava_ds.data.sample import FileRef, Media, Message, Sample
from llava_ds.data.sources import MAX_SHOWN, SourceOptions, open_sources, to_sample
from llava_ds.data.special_tokens import PART_END, in_lines

TALK = [{"from": "human", "value": "<image>\nWhat?"}, {"from": "gpt", "value": "A cat."}]
TEXT_ONLY = [{"from": "human", "value": "Who?"}, {"from": "gpt", "value": "Me."}]
CHAT = [{"role": "user", "content": "<image>\nWhat?"}, {"role": "assistant", "content": "A cat."}]


@pytest.fixture
def folder(tmp_path) -> Path:
    """An image folder with pictures, and pictures beside it that are out of bounds."""
    images = tmp_path / "images"
    (images / "sub").mkdir(parents=True)
    (tmp_path / "images-of-others").mkdir()
    for path in (
        images / "a.png",
        images / "sub" / "b.png",
        images / "c d.mp4",
        tmp_path / "secret.png",
        tmp_path / "images-of-others/a.png",
    ):
        path.write_bytes(b"a picture")
    os.symlink(tmp_path / "secret.png", images / "link.png")
    os.symlink(images / "a.png", images / "inner.png")
    os.symlink(tmp_path, images / "out")
    os.symlink(images / "loop.png", images / "loop.png")
    os.mkfifo(images / "pipe.png")
    return images


def opened(folder: Path, records: object, image_folder: object = "", **options):
    path = folder.parent / "data.json"
    path.write_text(json.dumps(records))
    root = str(folder) if image_folder == "" else image_folder
    (source,) = open_sources(str(path), SourceOptions(image_folder=root, cache_dir=str(folder.parent / "c"), **options))
    return source


def read(folder: Path, records: object, image_folder: object = "", **options) -> list[Sample]:
    source = opened(folder, records, image_folder, **options)
    return [to_sample(record.text, source, record.index) for record in source.read()]


def refused(folder: Path, record: object, good: dict | None = None, **options) -> str:
    """Why a record is rejected that stands behind a good one."""
    good = good or {"conversations": TEXT_ONLY}
    source = opened(folder, [good, record], **options)
    first, second = source.read()
    to_sample(first.text, source, 0)
    with pytest.raises(DataError) as caught:
        to_sample(second.text, source, 1)
    return str(caught.value)


def image(folder: Path, name: str) -> Media:
    return Media("image", (FileRef(str(folder / name)),))


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
    assert samples[0].media == (image(folder, "a.png"),)
    assert samples[1].media == () and samples[1].kind == "colour"
    assert samples[2].media == (image(folder, "sub/b.png"), image(folder, "a.png"))  # the link resolved


def test_images_stand_where_their_marks_are(folder):
    talk = [
        {"from": "human", "value": "First <image> then <image>?"},
        {"from": "gpt", "value": "Yes."},
        {"from": "human", "value": "And\n<image>"},
        {"from": "gpt", "value": "No."},
    ]
    (sample,) = read(folder, [{"image": ["a.png", "sub/b.png", "a.png"], "conversations": talk}])
    assert [m.text for m in sample.messages] == [turn["value"] for turn in talk]
    assert sample.media == tuple(image(folder, name) for name in ("a.png", "sub/b.png", "a.png"))


@pytest.mark.parametrize("value", [[], None, ""])
def test_no_image_may_be_said_in_three_ways(folder, value):
    assert read(folder, [{"conversations": TEXT_ONLY, "image": value}])[0].media == ()


def test_a_file_without_images_needs_no_image_folder(folder):
    assert len(read(folder, [{"conversations": TEXT_ONLY}], None)) == 1


def test_an_image_may_be_a_path_inside_the_folder_in_any_spelling(folder):
    for name in ("./a.png", "sub/../a.png", str(folder / "a.png"), f"file://{folder}/a.png", "out/images/a.png"):
        assert read(folder, [{"image": name, "conversations": TALK}])[0].media == (image(folder, "a.png"),)
    for name in (f"file://{folder}/c%20d.mp4", {"path": "c d.mp4"}):
        assert read(folder, [{"image": name, "conversations": TALK}])[0].media == (image(folder, "c d.mp4"),)


def test_videos_are_files_or_lists_of_frames(folder):
    """LLaVA-NeXT marks a video with <image>; <video> means the same where a record names videos."""
    frames = Media("frames", (FileRef(str(folder / "a.png")), FileRef(str(folder / "sub/b.png"))))
    movie = Media("video", (FileRef(str(folder / "c d.mp4")),))
    video_talk = [{"from": "human", "value": "<video>\nWhat?"}, TALK[1]]
    both = [{"from": "human", "value": "<video> or <image>?"}, TALK[1]]
    samples = read(
        folder,
        [
            {"video": "c d.mp4", "conversations": TALK},
            {"video": ["a.png", "sub/b.png"], "conversations": TALK},
            {"video": "c d.mp4", "conversations": video_talk},
            {"video": ["c d.mp4", "c d.mp4"], "conversations": [*video_talk, *video_talk]},
            {"video": [["a.png", "sub/b.png"], "c d.mp4"], "conversations": [*TALK, *TALK]},
            {"video": "c d.mp4", "image": "a.png", "conversations": both},
            {"conversations": [{"from": "human", "value": "What does the tag <video> do?"}, TALK[1]]},
        ],
    )
    expected = [[movie], [frames], [movie], [movie, movie], [frames, movie], [movie, image(folder, "a.png")], []]
    assert [list(sample.media) for sample in samples] == expected
    assert samples[2].messages[0].text == "<image>\nWhat?"
    assert samples[5].messages[0].text == "<image> or <image>?"
    assert samples[6].messages[0].text == "What does the tag <video> do?"


def test_videos_have_a_folder_of_their_own(folder, tmp_path):
    (tmp_path / "videos").mkdir()
    (tmp_path / "videos" / "v.mp4").write_bytes(b"a video")
    source = opened(folder, [{"video": "v.mp4", "conversations": TALK}], video_folder=str(tmp_path / "videos"))
    (record,) = source.read()
    assert to_sample(record.text, source, 0).media[0].refs == (FileRef(str(tmp_path / "videos" / "v.mp4")),)
    assert f"videos in {tmp_path / 'videos'}" in source.describe()
    assert "--video_folder" in refused(folder, {"video": "v.mp4", "conversations": TALK}, image_folder=None)


def test_sharegpt_records(folder):
    turns = [
        {"from": "system", "value": "Be brief."},
        {"from": "user", "value": "What?"},
        {"from": "assistant", "value": "A cat."},
    ]
    records = [
        {"conversations": turns, "images": ["a.png"]},
        {"conversations": turns[1:], "images": [], "system": "Be kind."},
        {"messages": [{"from": "human", "value": "<image>?"}, {"from": "bing", "value": "!"}], "images": ["a.png"]},
    ]
    source = opened(folder, records)
    assert source.format == "sharegpt"
    assert "ShareGPT records in a JSON list; conversation from 'conversations'" in source.describe()
    assert "image from 'images'" in source.describe() and "system from 'system'" in source.describe()
    assert "images without a mark are shown at the start of the first question" in source.describe()
    first, second, third = read(folder, records)
    assert first.messages == (
        Message("system", "Be brief."),
        Message("human", "<image>\nWhat?"),
        Message("gpt", "A cat."),
    )
    assert first.media == (image(folder, "a.png"),)
    assert second.messages[0] == Message("system", "Be kind.")
    assert [m.role for m in third.messages] == ["human", "gpt"] and third.media == first.media


def test_messages_with_parts(folder):
    def user(*parts) -> dict:
        return {"messages": [{"role": "user", "content": list(parts)}, {"role": "assistant", "content": "A cat."}]}

    words, more = {"type": "text", "text": "What?"}, {"type": "text", "text": "And?", "image": None}
    url = {"type": "image_url", "image_url": {"url": "sub/b.png"}}
    samples = read(
        folder,
        [
            {**user({"type": "image"}, words), "images": ["a.png"]},
            user(words, {"type": "image", "path": "a.png"}, more),
            user(url, {"type": "image", "image": "a.png"}, words, more),
            {**user(words, {"type": "image"}, url, more), "images": ["a.png"]},
            user({"type": "video", "video": ["a.png", "sub/b.png"]}, words),
            {"messages": CHAT, "images": ["a.png"]},
            {**user(words), "images": ["a.png", "sub/b.png"]},
        ],
    )
    assert [sample.messages[0].text for sample in samples] == [
        "<image>What?",
        "What?<image>And?",
        f"<image><image>What?{PART_END}And?{PART_END}",
        "What?<image><image>And?",
        "<image>What?",
        "<image>\nWhat?",
        "<image>\n<image>\nWhat?",
    ]
    kept = [sample.messages[0] for sample in samples if sample.messages[0].keeps_spaces]
    assert [in_lines(message.text) for message in kept] == [
        "<image>\nWhat?",
        "What?\n<image>\nAnd?",
        "<image>\n<image>\nWhat?And?",
        "What?\n<image>\n<image>\nAnd?",
        "<image>\nWhat?",
    ]
    assert [sample.messages[0].keeps_spaces for sample in samples] == [True] * 5 + [False] * 2
    a, b = image(folder, "a.png"), image(folder, "sub/b.png")
    frames = Media("frames", (a.refs[0], b.refs[0]))
    assert [list(sample.media) for sample in samples] == [[a], [a], [b, a], [a, b], [frames], [a], [a, b]]


def test_captions(folder):
    source = opened(folder, [{"image": "a.png", "text": "A cat."}, {"image": ["a.png", "sub/b.png"], "text": "Two."}])
    assert "captions in a JSON list; image from 'image', text from 'text'" in source.describe()
    one, two = (to_sample(record.text, source, 0) for record in source.read())
    assert one.messages == (Message("human", "<image>"), Message("gpt", "A cat."))
    assert two.messages[0].text == "<image>\n<image>" and len(two.media) == 2
    good = {"image": "a.png", "text": "A cat."}
    assert "has no image under 'image' or 'images' (its keys: 'text')" in refused(folder, {"text": "A cat."}, good)
    assert "has no caption under 'text' or 'caption'" in refused(folder, {"image": "a.png"}, good)
    assert "has 3 under 'text', expected text" in refused(folder, {"image": "a.png", "text": 3}, good)
    assert "<image> mark in its caption" in refused(folder, {"image": "a.png", "text": "An <image>."}, good)


def talk_of(*turns: object) -> dict:
    return {"conversations": list(turns)}


def chat_of(*parts: object) -> dict:
    return {"messages": [{"role": "user", "content": list(parts)}, CHAT[1]]}


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ("text", "is a str, expected an object with 'conversations'"),
        ({"id": "1", "turns": []}, "no list under 'conversations' or 'messages' (its keys: 'id', 'turns')"),
        ({}, "has no list under 'conversations' or 'messages' (its keys: none)"),
        ({"conversations": []}, "has an empty list under 'conversations'"),
        ({"conversations": 5}, "has 5 under 'conversations', expected a list of turns"),
        ({"conversations": TALK, "messages": CHAT}, "has both 'conversations' and 'messages': name one with --data_co"),
        (talk_of("hello"), "has 'hello' as number 0 of 'conversations', expected an object with a role"),
        (talk_of(TEXT_ONLY[0], "hello"), "turn 1 is 'hello', expected {'from': 'human' or 'gpt', 'value': text}"),
        (talk_of({"from": "human"}), "turn 0 is {'from': 'human'}, expected"),
        (talk_of({"from": "human", "value": 3}), "turn 0 is"),
        (talk_of(TEXT_ONLY[0], {"from": "dog", "value": "x"}), "turn 1 is from 'dog', expected 'human' or 'gpt'"),
        (talk_of(TEXT_ONLY[0], {"from": ["gpt"], "value": "x"}), "turn 1 is from ['gpt'], expected"),
        (
            talk_of({"from": "observation", "value": "x"}),
            "result of a tool, but no answer before it calls one",
        ),
        (
            talk_of(*TEXT_ONLY, {"from": "system", "value": "x"}),
            "turn 2 is from 'system': expected that once, at the be",
        ),
        ({"conversations": TEXT_ONLY, "system": 3}, "has 3 under 'system', expected text"),
        ({"conversations": TEXT_ONLY, "system": "<image>"}, "has an <image> mark in its system message"),
        ({"conversations": TEXT_ONLY, "id": ["x"]}, "has ['x'] for an id, expected text or a number"),
        ({"conversations": TALK, "image": ["a.png", 3]}, "under 'image', expected a path or a list of paths"),
        ({"conversations": TALK, "image": {"bytes": "x"}}, "with the key 'bytes': it is not read"),
        ({"conversations": TALK, "image": {"path": None}}, "as its image, expected a path"),
        (
            {"conversations": TALK},
            "names 0 images under 'image' or 'images', but its text has 1 <image> marks",
        ),
        ({"conversations": TALK, "image": ["a.png", "a.png"]}, "names 2 images under 'image'"),
        ({"conversations": TALK, "video": ["c d.mp4", "a.png"]}, "expected a video, its frames, or a list of these"),
        (
            {"conversations": [*TALK, *TALK], "video": "c d.mp4"},
            "names 1 videos under 'video' or 'videos', but its text",
        ),
        ({"conversations": TALK, "video": [["a.png"], []]}, "expected a video, its frames, or a list of these"),
        ({"conversations": TALK, "image": "none.png"}, "names the image 'none.png', but no file exists at"),
        ({"conversations": TALK, "image": "a.png/x.png"}, "names the image 'a.png/x.png', but no file exists at"),
        ({"conversations": TALK, "image": "sub"}, "names the image 'sub', but no file exists at"),
        ({"conversations": TALK, "image": "sub/"}, "it is a folder"),
        ({"conversations": TALK, "image": "pipe.png"}, "it is a named pipe"),
        ({"conversations": TALK, "image": "loop.png"}, "names the image 'loop.png', but it can't be read"),
        ({"conversations": TALK, "image": "x" * 300}, "but it can't be read: File name too long"),
        ({"conversations": TALK, "image": "x/" * 3000}, "not a valid file name: it is longer than 4096 bytes"),
        (
            {"conversations": TALK, "image": "/9j/" + "A" * 5000},
            "and looks like base64: put data:image/png;base64,",
        ),
        ({"conversations": TALK, "image": "a\0.png"}, "not a valid file name"),
        ({"conversations": TALK, "image": "\ud800.png"}, "not a valid file name"),
        ({"conversations": TALK, "image": [""]}, "not a valid file name: it is empty"),
        ({"conversations": TALK, "image": "../secret.png"}, "'../secret.png', outside the image folder"),
        ({"conversations": TALK, "image": ".."}, "outside the image folder"),
        ({"conversations": TALK, "image": "../images-of-others/a.png"}, "outside the image folder"),
        ({"conversations": TALK, "image": "/etc/hostname"}, "'/etc/hostname', outside the image folder"),
        ({"conversations": TALK, "image": "file:///etc/hostname"}, "outside the image folder"),
        ({"conversations": TALK, "image": "link.png"}, "'link.png', outside the image folder"),
        ({"conversations": TALK, "image": "out/secret.png"}, "'out/secret.png', outside the image folder"),
        ({"conversations": TALK, "image": "https://x.org/a.png"}, "a remote URL: these are never fetched"),
        ({"conversations": TALK, "image": "data:text/html,x"}, "as its image, expected a path (data:image/"),
        ({"conversations": TALK, "video": "../secret.png"}, "names the video '../secret.png', outside"),
        ({"conversations": TALK, "video": ["../secret.png"]}, "names the frame '../secret.png', outside"),
        (chat_of({"type": "audio"}), "turn 0 has a part of type 'audio': sounds are not supported"),
        (chat_of({"type": "file"}), "turn 0 has the part {'type': 'file'}, expected the type 'text', 'image'"),
        (
            {"conversations": [{"from": "human", "value": "<audio> What?"}, *TALK[1:]], "audios": ["a.wav"]},
            "names sounds under 'audios', and has <audio> marks for them: sounds are not supported",
        ),
        (chat_of({"type": "text", "text": 3}), "expected text under 'text'"),
        (chat_of({"type": "image"}), "names 0 images under 'image' or 'images', but its text has 1"),
        (chat_of({"type": "video", "video": []}), "names a video of 0 frames"),
        (chat_of({"type": "image_url", "image_url": {"url": "/etc/hostname"}}), "outside the image folder"),
        ({"messages": [{"role": "assistant", "content": None, "tool_calls": []}]}, "turn 0 is"),
        (talk_of({"from": "human", "value": "\ud83d"}), "turn 0 is not valid Unicode"),
        (chat_of({"type": "text", "text": "\ud83d"}), "turn 0 has the part"),
        ({"conversations": TEXT_ONLY, "id": "\ud83d"}, "for an id, expected text or a number"),
    ],
)
def test_a_record_that_can_not_be_used_says_why(folder, record, expected):
    assert expected in refused(folder, record)


def test_marks_are_asked_for_where_the_format_has_them(folder):
    """A ShareGPT record may leave them out, but not name another number of them."""
    good = {"conversations": TALK, "images": ["a.png"]}
    record = {"conversations": TALK, "images": ["a.png", "a.png"]}
    assert "names 2 images under 'image' or 'images', but its text has 1 <image>" in refused(folder, record, good)
    lost = {"conversations": [{"from": "human", "value": "<video>?"}, TALK[1]]}
    assert "names 0 videos under 'video' or 'videos', but its text has 1" in refused(folder, lost, good)
    answer_only = {"conversations": [TALK[1]], "images": ["a.png"]}
    assert "no question to show them in" in refused(folder, answer_only, good)


@pytest.mark.parametrize(
    "text", ["{", "", "[" * 100_000, '{"a":' * 5000, '{"id": ' + "9" * 5000 + "}", "\ud800", "NaN", "1e999", "\0"]
)
def test_text_that_is_no_record_is_refused(folder, text):
    source = opened(folder, [{"conversations": TEXT_ONLY}])
    with pytest.raises(DataError, match=r"can't be read as JSON|nested too deeply|expected an object"):
        to_sample(text, source, 0)


def test_images_without_an_image_folder_ask_for_it(folder):
    message = refused(folder, {"conversations": TALK, "image": "a.png"}, image_folder=None)
    assert "names the image 'a.png': give --image_folder" in message


def test_a_record_can_not_bring_a_reference_of_its_own(folder):
    """Only readers write references to slices of files: in a record of a JSON file they are no picture."""
    for path in (str(folder.parent / "secret.png"), str(folder / "a.png"), "x"):
        forged = {"llava_ds_file": path, "offset": 0, "num_bytes": 9}
        assert "expected a path" in refused(folder, {"conversations": TALK, "image": forged})
        assert "expected a path" in refused(folder, {"conversations": TALK, "image": [forged]})
        assert "expected a path" in refused(folder, chat_of({"type": "image", "image": forged}))
        assert "expected a path" in refused(folder, {"conversations": TALK, "video": forged})
    source = opened(folder, [{"conversations": TALK, "image": "a.png"}])
    forged = {"llava_ds_file": min(source.slices_of), "offset": 0, "num_bytes": 9}
    with pytest.raises(DataError, match="can't be read"):
        to_sample(json.dumps({"conversations": TALK, "image": forged}), source, 0)


def test_a_source_travels_to_workers(folder):
    source = opened(folder, [{"conversations": TALK, "image": "a.png"}])
    (record,) = source.read()
    again = pickle.loads(pickle.dumps(source))
    assert again == source and to_sample(record.text, again, 0) == to_sample(record.text, source, 0)


def test_plain_text_asks_the_system_nothing(folder, monkeypatch):
    source = opened(folder, [{"conversations": TEXT_ONLY}])
    (record,) = source.read()
    for name in ("stat", "lstat", "open"):
        monkeypatch.setattr(os, name, None)
    to_sample(record.text, source, 0)


@pytest.mark.parametrize("num_bad", [1, MAX_SHOWN, MAX_SHOWN + 1, 40])
def test_read_samples_counts_problems_and_shows_the_first(folder, num_bad):
    path = folder.parent / "data.json"
    path.write_text(json.dumps([{"conversations": TEXT_ONLY}] * 3 + [{}] * num_bad))
    with pytest.raises(DataError) as caught:
        read_samples(path, folder)
    head, *lines = str(caught.value).splitlines()
    assert head == f"{path}: {num_bad} of {num_bad + 3} records can't be used"
    assert lines[0].startswith("  record 3: has no list under")
    assert sum(line.startswith("  record ") for line in lines) == min(num_bad, MAX_SHOWN)
    more = [line for line in lines if line.strip().startswith("and ")]
    assert more == ([f"  and {num_bad - MAX_SHOWN} more"] if num_bad > MAX_SHOWN else [])


def test_unknown_records_are_refused_with_the_keys_found(folder):
    with pytest.raises(ConfigError) as caught:
        opened(folder, [{"url": "a.html", "score": 3}, 3])
    message = str(caught.value)
    assert "of no known format: none of their keys is known (keys found: 'url', 'score'); known are llava: {" in message
    assert all(f"{name}: {{" in message for name in ("messages", "texts", "question_answer", "caption"))


def test_two_names_for_one_field_are_refused_until_one_is_named(folder):
    record = {"conversations": TALK, "image": "a.png", "images": ["sub/b.png"]}
    with pytest.raises(ConfigError, match="have 'image' and 'images', and either could be the image: name one with"):
        opened(folder, [record])
    (sample,) = read(folder, [record], columns=(("image", "images"),))
    assert sample.media == (image(folder, "sub/b.png"),)


def test_the_format_may_be_named(folder):
    record = {"conversations": TALK, "image": "a.png", "text": "A cat."}
    assert opened(folder, [record]).format == "llava"
    (sample,) = read(folder, [record], data_format="caption")
    assert sample.messages == (Message("human", "<image>"), Message("gpt", "A cat."))


def test_columns_may_be_named(folder):
    record = {"dialog": TALK, "picture": "a.png", "name": "n"}
    columns = (("conversations", "dialog"), ("image", "picture"), ("id", "name"))
    source = opened(folder, [record], columns=columns)
    assert "conversation from 'dialog', image from 'picture', id from 'name'" in source.describe()
    (sample,) = read(folder, [record], columns=columns)
    assert sample.id == "n" and sample.media == (image(folder, "a.png"),)
    with pytest.raises(ConfigError, match=r"conversations=dialogue: no record of .* \(keys found: 'dialog', 'picture'"):
        opened(folder, [record], columns=(("conversations", "dialogue"),))


UNMARKED = {
    "image": {"conversations": TEXT_ONLY, "image": "a.png"},
    "mark": {"conversations": TALK},
}


@pytest.mark.parametrize(
    ("how", "name", "unmarked", "question", "num_media"),
    [
        ("prepend", "image", "image prepended", "<image>\nWho?", 1),
        ("text", "image", "image left out", "Who?", 0),
        ("text", "mark", "mark as text", "\ufdd0image\ufdd1", 0),
    ],
)
def test_an_unmarked_image_is_shown_or_left_out_as_asked(folder, how, name, unmarked, question, num_media):
    source = opened(folder, [UNMARKED[name]], on_unmarked_image=how)
    [record] = source.read()
    sample = to_sample(record.text, source, 0)
    assert (sample.unmarked, len(sample.media)) == (unmarked, num_media)
    assert sample.messages[0].text.startswith(question)


@pytest.mark.parametrize(("how", "name"), [("refuse", "image"), ("refuse", "mark"), ("prepend", "mark")])
def test_an_unmarked_image_that_is_refused_names_the_flag(tmp_path, how, name):
    source = opened(tmp_path, [UNMARKED[name]], on_unmarked_image=how)
    [record] = source.read()
    with pytest.raises(DataError, match="make them equal, or see --on_unmarked_image"):
        to_sample(record.text, source, 0)


def test_a_long_id_is_kept_by_its_hash(tmp_path):
    ids = ["x" * 5_000_000 + end for end in "ab"]
    samples = read(tmp_path, [{"id": name, "conversations": TEXT_ONLY} for name in ids])
    assert len({sample.id for sample in samples}) == 2 and all(len(sample.id) <= 1000 for sample in samples)
