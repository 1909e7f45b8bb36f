"""Checked and encoded once, found again when nothing has changed, and nothing lost in silence."""

import json
import os
import shutil
import sys
from pathlib import Path

import pytest
import torch
import toys
from PIL import Image
from transformers import AutoTokenizer

from llava_ds.constants import IGNORE_INDEX, IMAGE_TOKEN_INDEX, DataError
from llava_ds.data import dataset as dataset_module
from llava_ds.data import preflight as preflight_module
from llava_ds.data.dataset import BrokenSample, EncodedDataset
from llava_ds.data.encode import Encoder
from llava_ds.data.preflight import Checker, reasons_in_short
from llava_ds.data.sources import read_samples
from llava_ds.tiny.tokenizer import save_tokenizer, train_tokenizer

P = (toys.IMAGE_SIZE // toys.PATCH_SIZE) ** 2
KINDS = "titti"


@pytest.fixture
def opened(tmp_path, tokenizer):
    """open_encoded on toy data; keywords replace its settings."""
    data = toys.write_data(tmp_path / "data", KINDS)
    return lambda **changed: toys.encoded(**{**data, "tokenizer": tokenizer, "cache_dir": tmp_path / "c", **changed})


@pytest.fixture
def no_work(monkeypatch):
    """From its call on, records can't be checked and files can't be read."""

    def refuse(*_, **__):
        raise AssertionError("done again")

    def start():
        monkeypatch.setattr(Checker, "__call__", refuse)
        monkeypatch.setattr(dataset_module, "_write_rows", refuse)

    return start


def write(path: Path, records: list) -> str:
    path.write_text(json.dumps(records))
    return str(path)


def talk(*texts: str, **more) -> dict:
    turns = [{"from": ("human", "gpt")[i % 2], "value": text} for i, text in enumerate(texts)]
    return {"conversations": turns, **more}


def same(one: EncodedDataset, other: EncodedDataset) -> bool:
    pairs = [(one[i], other[i]) for i in range(len(one))]
    return len(one) == len(other) and all(
        torch.equal(a.input_ids, b.input_ids) and torch.equal(a.labels, b.labels) for a, b in pairs
    )


def test_samples_are_the_records_encoded_and_their_pictures_prepared(opened, tmp_path, tokenizer):
    data = opened()
    samples = read_samples(tmp_path / "data" / "data.json", tmp_path / "data" / "images")
    assert len(data) == len(samples) == len(KINDS)
    encoder = Encoder(tokenizer, toys.encoding_options())
    for i, sample in enumerate(samples):
        [coded] = encoder.encode_batch([(sample.messages, [P] * len(sample.media))])
        loaded = data[i]
        assert loaded.input_ids.dtype == loaded.labels.dtype == torch.int64
        assert loaded.input_ids.tolist() == coded.input_ids.tolist()
        assert loaded.labels.tolist() == coded.labels.tolist()
        assert data.lengths[i] == len(coded.input_ids) and data.num_targets[i] == coded.num_targets
        assert int((loaded.input_ids == IMAGE_TOKEN_INDEX).sum()) == P * (KINDS[i] == "i")
        assert [tuple(pixels.shape) for pixels, _ in loaded.media] == [(1, 3, 24, 24)] * len(sample.media)
    assert torch.equal(data.example().input_ids, data[KINDS.index("i")].input_ids)


def test_a_second_opening_repeats_nothing(opened, no_work):
    first = opened()
    no_work()
    again = opened()
    assert again.fingerprint == first.fingerprint and same(again, first)


def test_touched_and_copied_files_are_the_same_data(opened, no_work, tmp_path):
    first = opened()
    os.utime(tmp_path / "data" / "data.json", ns=(1, 1))
    no_work()
    assert opened().fingerprint == first.fingerprint


def test_moved_data_are_the_same_data(opened, tmp_path):
    first = opened()
    shutil.move(tmp_path / "data", tmp_path / "elsewhere")
    moved = opened(
        data_path=str(tmp_path / "elsewhere" / "data.json"), image_folder=str(tmp_path / "elsewhere" / "images")
    )
    assert moved.fingerprint == first.fingerprint and moved.lengths == first.lengths
    assert moved.example().media  # found where it is now


def test_the_fingerprint_changes_with_all_that_samples_depend_on(opened, tmp_path):
    prints = [opened().fingerprint]
    for encoding in ({"max_length": 511}, {"supervise_last_turn_only": True}):
        prints.append(opened(encoding=toys.encoding_options(**encoding)).fingerprint)
    for pictures in ({"aspect_ratio": "pad"}, {"fast_decoding": True}, {"mean": (0.1, 0.1, 0.1)}):
        prints.append(opened(pictures=toys.picture_options(**pictures)).fingerprint)
    (tmp_path / "other").mkdir()
    save_tokenizer(train_tokenizer([*toys.TEXTS, "What is it, number? There is no dog."], 420), tmp_path / "other")
    prints.append(opened(tokenizer=AutoTokenizer.from_pretrained(tmp_path / "other")).fingerprint)
    records = json.loads((tmp_path / "data" / "data.json").read_text())
    records[0]["conversations"][1]["value"] += "!"
    prints.append(opened(data_path=write(tmp_path / "changed.json", records)).fingerprint)
    assert len(set(prints)) == len(prints)


def test_the_fingerprint_changes_with_the_template(opened, tmp_path):
    data = toys.write_data(tmp_path / "captions", "iii", plain=True)
    prints = {opened(**data, encoding=toys.encoding_options(template=name)).fingerprint for name in ("v1", "plain")}
    assert len(prints) == 2


def test_several_processes_give_the_same_rows_in_the_same_order(opened, tmp_path, monkeypatch):
    records = [talk(f"Who is number {i}?", "yes" if i % 7 else "") for i in range(300)]
    path = write(tmp_path / "many.json", records)
    one = opened(data_path=path, num_workers=1, max_bad_fraction=0.5)
    monkeypatch.setattr(dataset_module, "RECORDS_PER_WORKER", 50)
    monkeypatch.setattr(dataset_module, "RECORDS_PER_CALL", 16)
    many = opened(data_path=path, num_workers=3, max_bad_fraction=0.5, cache_dir=tmp_path / "other")
    assert len(many.table.cache_files) == 3
    assert many.fingerprint == one.fingerprint and same(one, many)
    assert list(many.rejections()) == list(one.rejections()) and one.num_rejected == 43
    assert one.num_rejected + len(one) == one.num_records == 300


def test_no_record_of_a_large_file_is_lost(opened, tmp_path):
    path = write(tmp_path / "many.json", [talk(f"Who is number {i}?", "yes", id=str(i)) for i in range(3500)])
    data = opened(data_path=path, num_workers=1)
    assert [data.row(i)["id"] for i in range(data.num_records)] == [str(i) for i in range(3500)]


def test_bad_records_are_left_out_and_named(opened, tmp_path):
    records = [talk("Who?", "yes") for _ in range(200)]
    records[7] = {"id": "x7", "conversations": "none"}
    data = opened(data_path=write(tmp_path / "bad.json", records))
    assert len(data) == 199 and data.num_rejected == 1
    [row] = data.rejections()
    assert (row["file"], row["line"], row["index"]) == (str(tmp_path / "bad.json"), 1, 7) and row["reason"]
    assert [data.table[int(r)]["index"] for r in data.rows] == [i for i in range(200) if i != 7]


def test_too_many_bad_records_are_refused_with_the_first_of_them_and_a_list(opened, tmp_path):
    records = [talk("Who?", "yes"), talk("Who?", ""), talk("What is it? " * 30, "two", id="long")]
    settings = {"data_path": write(tmp_path / "bad.json", records), "encoding": toys.encoding_options(max_length=150)}
    with pytest.raises(DataError) as caught:
        opened(**settings)
    message = str(caught.value)
    assert "2 of 3 records (66.67%) can't be trained on, --max_bad_fraction allows 1.00%" in message
    assert "record 1 (1): nothing to learn from: no answer has a text" in message
    assert "record 2 (long): nothing to learn from: the first 150 tokens hold no answer" in message
    assert "record 0" not in message
    assert len(opened(**settings, max_bad_fraction=0.7)) == 1
    with pytest.raises(DataError, match="--on_bad_sample stop allows none"):
        opened(**settings, max_bad_fraction=0.7, on_bad_sample="stop")
    [listing] = (tmp_path / "c").rglob("rejected.jsonl")
    assert [json.loads(line)["index"] for line in listing.read_text().splitlines()] == [1, 2]


def test_no_sample_at_all_is_refused_whatever_the_limit(opened, tmp_path):
    path = write(tmp_path / "bad.json", [talk("Who?", "")])
    with pytest.raises(DataError, match="1 of 1 records"):
        opened(data_path=path, max_bad_fraction=1.0)
    data = opened(data_path=path, on_bad_sample="list")  # as inspection does
    assert len(data) == 0 and data.num_rejected == 1 and any("1 rejected" in line for line in data.summary())


def test_every_sample_has_something_to_learn_from(opened):
    data = opened()
    assert all(int((data[i].labels[1:] != IGNORE_INDEX).sum()) == data.num_targets[i] > 0 for i in range(len(data)))


def test_a_picture_that_was_missing_is_looked_for_again(opened, tmp_path):
    picture = tmp_path / "data" / "images" / "1.png"
    picture.rename(tmp_path / "away.png")
    without = opened(max_bad_fraction=0.5)
    assert without.num_rejected == 1 and "1.png" in next(without.rejections())["reason"]
    assert opened(max_bad_fraction=0.5).num_rejected == 1
    (tmp_path / "away.png").rename(picture)
    whole = opened(max_bad_fraction=0.5)
    assert whole.num_rejected == 0 and len(whole) == len(KINDS) and whole.fingerprint != without.fingerprint


@pytest.mark.parametrize("how", ["gone", "cut", "another size"])
def test_a_picture_that_breaks_later_is_a_broken_sample(opened, tmp_path, how):
    data = opened(pictures=toys.picture_options(aspect_ratio="anyres"))
    picture = tmp_path / "data" / "images" / "1.png"
    if how == "gone":
        picture.unlink()
    elif how == "cut":
        picture.write_bytes(picture.read_bytes()[:200])
    else:
        Image.new("RGB", (90, 20)).save(picture)
    broken = data[1]
    assert isinstance(broken, BrokenSample) and broken.id == "s1" and str(picture) in broken.reason
    assert len(data[0].input_ids) == data.lengths[0]


def test_the_summary_counts_what_there_is(opened, tmp_path):
    data = opened()
    tokens = sum(len(data[i].input_ids) for i in range(len(data)))
    targets = sum(int((data[i].labels != IGNORE_INDEX).sum()) for i in range(len(data)))
    turns = sum(len(r["conversations"]) // 2 for r in json.loads((tmp_path / "data" / "data.json").read_text()))
    text = "\n".join(data.summary())
    assert "5 records: 5 accepted, 0 rejected" in text and "left out" not in text
    assert f"{turns} answers, 2 pictures, {tokens:,} tokens, of which {targets:,} (" in text
    assert f"100 % {max(data.lengths):,}" in text and "cut short" not in text
    limit = max(data.lengths) - 1
    text = "\n".join(opened(encoding=toys.encoding_options(max_length=limit)).summary())
    assert f"{sum(n > limit for n in data.lengths)} samples cut short" in text


def test_llavas_lengths_count_words(opened, tmp_path):
    data = opened()
    records = json.loads((tmp_path / "data" / "data.json").read_text())
    words = [sum(len(turn["value"].split()) for turn in record["conversations"]) for record in records]
    assert data.lengths_for("modality") == [n if "image" in r else -n for n, r in zip(words, records)]
    assert data.lengths_for("length") == [n + 128 if "image" in r else n for n, r in zip(words, records)]
    assert data.lengths_for("bucket") == data.lengths


def test_no_scratch_folder_is_left(opened, tmp_path):
    opened()
    with pytest.raises(DataError):
        opened(data_path=write(tmp_path / "empty.json", []))
    assert not [path for path in (tmp_path / "c" / "encoded").iterdir() if "." in path.name]


def test_reasons_are_counted_alike_but_for_names_and_numbers():
    lines = reasons_in_short(["no file '/a/b.png'", "no file '/c d/e.png'", "turn 3 is from 'x'"])
    assert lines == ["  2 x no file …", "  1 x turn 3 is from 'x'"]
    assert reasons_in_short([f"reason {'x' * i}" for i in range(12)])[-1] == "  and 4 more reasons"


def test_a_video_without_its_decoder_is_a_rejected_record(opened, tmp_path, monkeypatch):
    """Others can be trained on, and it is tried again when the decoder may be there."""
    monkeypatch.setitem(sys.modules, "av", None)
    (tmp_path / "a.mp4").write_bytes(b"a video")
    records = [talk("Who?", "yes"), talk("<video>\nWho?", "yes", video="a.mp4")]
    path = write(tmp_path / "video.json", records)
    data = opened(data_path=path, image_folder=str(tmp_path), max_bad_fraction=0.5)
    [row] = data.rejections()
    assert row["index"] == 1 and "llava_ds[video]" in row["reason"]


def test_long_records_are_checked_a_few_at_a_time(opened, tmp_path, monkeypatch):
    records = [talk(f"Who is number {i}? " * (i % 5), "yes", id=str(i)) for i in range(40)]
    path = write(tmp_path / "long.json", records)
    once = opened(data_path=path)
    seen = []
    rows = Checker._rows
    monkeypatch.setattr(Checker, "_rows", lambda self, part: seen.append(len(part)) or rows(self, part))
    monkeypatch.setattr(preflight_module, "PART_BYTES", 400)
    monkeypatch.setattr(dataset_module, "CHARS_PER_BATCH", 500)
    again = opened(data_path=path, cache_dir=tmp_path / "other")
    assert same(once, again) and sum(seen) == 40 and 1 <= min(seen) < max(seen) < 8
