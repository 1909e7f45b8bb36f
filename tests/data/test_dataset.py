"""Checked and encoded once, found again when nothing has changed, and nothing lost in silence."""

import base64
import copy
import gc
import io
import json
import os
import pickle
import shutil
import signal
import sys
import tarfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch
import toys
from PIL import Image
from read_data import read_samples
from thinking_templates import QWEN3, TOKENS
from transformers import AutoTokenizer

from llava_ds.constants import IGNORE_INDEX, IMAGE_TOKEN_INDEX, DataError
from llava_ds.data import cache, fingerprint, seen_files, shards
from llava_ds.data import dataset as dataset_module
from llava_ds.data import encoded_rows as rows_module
from llava_ds.data import preflight as preflight_module
from llava_ds.data.collate import counts_of
from llava_ds.data.dataset import BrokenSample, EncodedDataset, check_same_data
from llava_ds.data.encode import Encoder
from llava_ds.data.encoded_rows import media_of_text, reasons_in_short
from llava_ds.data.preflight import Checker
from llava_ds.files import reading as file_contents
from llava_ds.runtime.ranks import Ranks
from llava_ds.tiny.build_tokenizer import save_tokenizer, train_tokenizer
from llava_ds.tokenizer import note_rows

P = (toys.IMAGE_SIZE // toys.PATCH_SIZE) ** 2
KINDS = "titti"
SECOND = Ranks(rank=1, local_rank=1, world_size=1, device=torch.device("cpu"))  # with no share of a single file


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
        monkeypatch.setattr(shards, "encode_together", refuse)

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


def test_samples_are_the_records_encoded_and_their_images_prepared(opened, tmp_path, tokenizer):
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
        [counts] = map(counts_of, data.undecoded(i))
        assert [each[i] for each in data.sizes] == [counts.tokens, counts.targets, counts.tiles, counts.tile_pairs]
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
    assert moved.fingerprint == first.fingerprint and moved.lengths.tolist() == first.lengths.tolist()
    assert moved.example().media  # found where it is now


def test_the_fingerprint_changes_with_all_that_samples_depend_on(opened, tmp_path):
    prints = [opened().fingerprint]
    for encoding in ({"max_length": 511}, {"supervise_last_turn_only": True}):
        prints.append(opened(encoding=toys.encoding_options(**encoding)).fingerprint)
    for pictures in ({"aspect_ratio": "pad"}, {"fast_decoding": True}, {"mean": (0.1, 0.1, 0.1)}):
        prints.append(opened(images=toys.image_options(**pictures)).fingerprint)
    (tmp_path / "other").mkdir()
    save_tokenizer(train_tokenizer([*toys.TEXTS, "What is it, number? There is no dog."], 420), tmp_path / "other")
    prints.append(opened(tokenizer=AutoTokenizer.from_pretrained(tmp_path / "other")).fingerprint)
    records = json.loads((tmp_path / "data" / "data.json").read_text())
    records[0]["conversations"][1]["value"] += "!"
    prints.append(opened(data_path=write(tmp_path / "changed.json", records)).fingerprint)
    assert len(set(prints)) == len(prints)


def test_another_version_of_a_library_encodes_anew_and_the_same_rows_are_the_same_data(opened, monkeypatch):
    before = opened()
    monkeypatch.setattr(fingerprint.importlib.metadata, "version", lambda name: "0.0")
    after = opened()
    assert after.folder != before.folder and after.fingerprint == before.fingerprint


def no_change(tokenizer) -> None: ...


def other_bos(tokenizer) -> None:
    tokenizer.backend_tokenizer.post_processor = None


def other_name(tokenizer) -> None:
    tokenizer.pad_token = tokenizer.eos_token


def other_template(tokenizer) -> None:
    tokenizer.chat_template = "{{ messages }}"


def other_space(tokenizer) -> None:
    tokenizer.init_kwargs |= {"sentencepiece_first_space_only": True}


def other_token(tokenizer) -> None:
    tokenizer.add_tokens(["<x>"])


@pytest.mark.parametrize("change", [no_change, other_bos, other_name, other_template, other_space, other_token])
def test_all_that_ids_depend_on_is_told_of_a_tokenizer(tokenizer, change):
    changed = copy.deepcopy(tokenizer)
    change(changed)
    same = fingerprint.tokenizer_parts(changed) == fingerprint.tokenizer_parts(tokenizer)
    assert same == (change is no_change)


def test_the_fingerprint_changes_with_the_template(opened, tmp_path):
    data = toys.write_data(tmp_path / "captions", "iii", plain=True)
    prints = {opened(**data, encoding=toys.encoding_options(template=name)).fingerprint for name in ("v1", "plain")}
    assert len(prints) == 2


def test_several_processes_give_the_same_rows_in_the_same_order(opened, tmp_path, monkeypatch):
    gc.collect()  # a process group that an earlier test left: its end, in a forked process, would wait for ever
    records = [talk(f"Who is number {i}?", "yes" if i % 7 else "") for i in range(300)]
    path = write(tmp_path / "many.json", records)
    one = opened(data_path=path, num_workers=1, max_bad_fraction=0.5)
    monkeypatch.setattr(shards, "SHARD_RECORDS", 50)
    monkeypatch.setattr(shards, "RECORDS_PER_CALL", 16)
    many = opened(data_path=path, num_workers=3, max_bad_fraction=0.5, cache_dir=tmp_path / "other")
    assert len(many.table.paths) == 6
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
    assert [data.row(int(r))["index"] for r in data.rows] == [i for i in range(200) if i != 7]


def test_too_many_bad_records_are_refused_with_the_first_of_them_and_a_list(opened, tmp_path):
    records = [talk("Who?", "yes"), talk("Who?", ""), talk("What is it? " * 30, "two", id="long")]
    settings = {"data_path": write(tmp_path / "bad.json", records), "encoding": toys.encoding_options(max_length=150)}
    with pytest.raises(DataError) as caught:
        opened(**settings)
    message = str(caught.value)
    assert "2 of 3 records (66.67%) can't be trained on, --max_bad_fraction allows 1.00%" in message
    assert "record 1 (1): nothing to learn from: no answer has a text" in message
    assert "record 2 (long): nothing to learn from: the first 150 tokens contain no answer" in message
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


def test_an_image_that_was_missing_is_looked_for_again(opened, tmp_path):
    picture = tmp_path / "data" / "images" / "1.png"
    picture.rename(tmp_path / "away.png")
    without = opened(max_bad_fraction=0.5)
    assert without.num_rejected == 1 and "1.png" in next(without.rejections())["reason"]
    assert opened(max_bad_fraction=0.5).num_rejected == 1
    (tmp_path / "away.png").rename(picture)
    whole = opened(max_bad_fraction=0.5)
    assert whole.num_rejected == 0 and len(whole) == len(KINDS) and whole.fingerprint != without.fingerprint


@pytest.mark.parametrize("how", ["gone", "cut", "another size"])
def test_an_image_that_breaks_later_is_a_broken_sample(opened, tmp_path, how):
    data = opened(images=toys.image_options(aspect_ratio="anyres"))
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
    assert f"{turns} answers, 2 images, {tokens:,} tokens, of which {targets:,} (" in text
    assert f"100 % {max(data.lengths):,}" in text and "cut short" not in text
    limit = max(data.lengths) - 1
    text = "\n".join(opened(encoding=toys.encoding_options(max_length=limit)).summary())
    assert f"{sum(n > limit for n in data.lengths)} samples cut short" in text


def test_the_summary_names_what_is_not_read_and_not_learned(opened, tmp_path, tokenizer, no_work):
    """Also from a warm cache. A record whose answers are all switched off is bad."""
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.add_special_tokens({"extra_special_tokens": list(TOKENS)})
    tokenizer.chat_template = QWEN3
    told = talk("Who?", "<think>a</think>Me.", "Sure?", "<think>b</think>Yes.", url="x", page=3)
    plain = [talk("Who?", "Me.", url="y", note=None), talk("Who?", "Me.", objects={}, text="unused")]
    silent = talk("Who?", "Me.", id="silent")
    silent["conversations"][1]["loss"] = False
    path = write(tmp_path / "told.json", [told, told, *plain, silent])
    settings = {"data_path": path, "image_folder": None, "tokenizer": tokenizer, "on_bad_sample": "list"}
    settings["encoding"] = toys.encoding_options(template="chat_template")
    text = "\n".join(opened(**settings).summary())
    assert "2 thoughts of 2 records are not learned: the chat template omits them" in text
    assert "keys of records that are not read: 'url' (3 records), 'page' (2 records), 'text' (1 records)\n" in text
    assert "nothing to learn from: all of its answers weigh 0" in text
    last = {**settings, "encoding": toys.encoding_options(template="chat_template", supervise_last_turn_only=True)}
    off = talk("Who?", "Me.", "Sure?", "Yes.")
    off["conversations"][3]["weight"] = 0
    last["data_path"] = write(tmp_path / "off.json", [*plain, off])
    assert "its last answer weighs 0, and no other is learned" in "\n".join(opened(**last).summary())
    no_work()
    assert "\n".join(opened(**settings).summary()) == text


def test_llavas_lengths_count_words(opened, tmp_path):
    data = opened()
    records = json.loads((tmp_path / "data" / "data.json").read_text())
    words = [sum(len(turn["value"].split()) for turn in record["conversations"]) for record in records]
    assert data.lengths_for("modality").tolist() == [n if "image" in r else -n for n, r in zip(words, records)]
    assert data.lengths_for("modality_auto").tolist() == data.lengths_for("modality").tolist()
    assert data.lengths_for("varlen").tolist() == data.lengths_for("length").tolist()
    assert data.lengths_for("length").tolist() == [n + 128 if "image" in r else n for n, r in zip(words, records)]
    assert data.lengths_for("bucket").tolist() == data.lengths.tolist()


def test_rows_that_are_read_stay_where_they_are(opened, tmp_path):
    picture = tmp_path / "data" / "images" / "1.png"
    picture.rename(tmp_path / "away.png")
    running = opened(max_bad_fraction=0.5)
    (tmp_path / "away.png").rename(picture)
    assert len(opened(max_bad_fraction=0.5)) == len(running) + 1
    assert all(Path(path).is_file() for path in running.table.paths)
    again = pickle.loads(pickle.dumps(running))  # as a worker process gets it, which opens the files anew
    assert same(again, running) and list(again.rejections()) == list(running.rejections())


@pytest.mark.parametrize("damage", ["cut", "nonsense", "list"])
def test_damaged_rows_are_made_anew(opened, damage):
    whole = opened()
    [rows] = map(Path, whole.table.paths)
    size = rows.stat().st_size
    # Unlinked first: cutting a file that is mapped would end this process.
    data = rows.read_bytes()
    rows.unlink()
    if damage == "cut":
        rows.write_bytes(data[: size // 2])
    elif damage == "nonsense":
        rows.write_bytes(b"\xff" * size)
    elif damage == "list":
        rows.write_bytes(data)
        (rows.parent / "files.json").write_text("{")
    again = opened()
    assert again.fingerprint == whole.fingerprint and same(again, whole) and again.folder != whole.folder


@pytest.fixture
def many(opened, tmp_path, monkeypatch):
    """Opens 80 records with an image each and 40 without, in 12 files of rows, of which 3 stay open."""
    images = tmp_path / "data" / "images"
    for i in range(80):
        Image.new("RGB", (9 + i, 9)).save(images / f"many{i}.png")
    records = [talk("<image>\nWho?", "yes", image=f"many{i}.png", id=str(i)) for i in range(80)]
    records += [talk("Who?", "yes", id=str(i)) for i in range(80, 120)]
    path = write(tmp_path / "many.json", records)
    monkeypatch.setattr(shards, "SHARD_RECORDS", 10)
    monkeypatch.setattr(cache, "NUM_OPEN", 3)
    return lambda **changed: opened(**{"data_path": path, "num_workers": 1, **changed})


def test_of_many_files_of_rows_few_are_open(many, monkeypatch):
    data, read, mapped = many(), [], cache.map_rows
    monkeypatch.setattr(
        cache, "map_rows", lambda path, *rest: read.append(int(Path(path).name[5:11])) or mapped(path, *rest)
    )
    again = many()
    assert read == [0, 11, *range(8)]  # for the number of rows; and those that have images
    read.clear()
    assert [again.row(i)["id"] for i in range(120)] == [str(i) for i in range(120)] and read == list(range(12))
    assert len(again.table._open) == 3
    assert [again.row(i)["id"] for i in (119, 90, 100, 10, 119)] == ["119", "90", "100", "10", "119"]
    assert read[12:] == [1, 11]  # 11 had to make room
    ids = again.table.take(["id"], np.array([3, 4, 57, 119])).column("id").to_pylist()
    assert ids == ["3", "4", "57", "119"] and same(pickle.loads(pickle.dumps(again)), data)
    damaged = Path(again.table.paths[5])
    rows = damaged.read_bytes()
    damaged.unlink()
    damaged.write_bytes(b"\xff" * len(rows))
    with pytest.raises(DataError, match=r"rows-000005-.* can't be read: .*remove its folder"):
        again.row(55)


def test_many_images_are_looked_at_by_several_processes(many, tmp_path, monkeypatch):
    data, seen, stamp = many(), tmp_path / "seen", seen_files.stamp_of

    def noted(path):
        with open(seen, "a") as file:  # by processes of which this one knows nothing
            file.write(f"{os.getpid()} {os.path.basename(os.fsdecode(path))}\n")
        return stamp(path)

    monkeypatch.setattr(seen_files, "stamp_of", noted)
    monkeypatch.setattr(seen_files, "NUM_SAMPLED", 0)
    monkeypatch.setattr(seen_files, "FILES_PER_PROCESS", 2)

    def looks() -> tuple[int, list[str]]:
        """How many processes looked when the data was opened again, and at what."""
        pids, names = zip(*(line.split() for line in seen.read_text().splitlines()))
        seen.unlink()
        return len(set(pids)), sorted(names)

    everything = sorted(f"many{i}.png" for i in range(80))
    assert many(num_workers=3).folder == data.folder and looks() == (3, everything)  # eight files of rows have images
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")  # a core for each rank
    assert many(num_workers=3).folder == data.folder and looks() == (1, everything)
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    path = next(tmp_path.rglob("many71.png"))
    content = path.read_bytes()
    path.write_bytes(content[:-1] + b"x")
    table, options = data.table, data.image_options
    assert seen_files.changed_files(table, options, media_of_text, range(8), 4) == [str(path)]
    monkeypatch.setattr(seen_files, "_digest_or_none", lambda _: os.kill(os.getpid(), signal.SIGKILL))
    with pytest.raises(DataError, match="a worker process was killed"):
        seen_files.changed_files(table, options, media_of_text, range(8), 4)


def test_all_ranks_look_for_changed_images_each_at_its_part(many, tmp_path, monkeypatch):
    data, looked = many(), []
    stamp = seen_files.stamp_of
    monkeypatch.setattr(
        seen_files, "stamp_of", lambda path: looked.append(os.path.basename(os.fsdecode(path))) or stamp(path)
    )
    monkeypatch.setattr(seen_files, "NUM_SAMPLED", 0)
    caches = [1, 1, 2, 1]  # rank 2 is on a machine with a cache of its own

    def as_rank(rank: int) -> EncodedDataset:
        ranks = Ranks(rank, 0, 4, torch.device("cpu"))
        share = dataset_module._share
        with monkeypatch.context() as patch:
            patch.setattr(
                dataset_module, "gather", lambda own, _: [own if each == caches[rank] else "other" for each in caches]
            )
            found = share(dataset_module.CachedRows(data.table, data.folder), ranks)
            patch.setattr(dataset_module, "gather", lambda value, _: [value])
            patch.setattr(dataset_module, "_share", lambda *_: found)
            looked.clear()
            return many()

    parts = []
    for rank in range(4):
        assert as_rank(rank).folder == data.folder
        parts.append(list(looked))
    everything = sorted(f"many{i}.png" for i in range(80))
    assert sorted(parts[0] + parts[1] + parts[3]) == everything == sorted(parts[2])
    assert min(map(len, parts)) >= 20
    repainted(tmp_path / "data" / "images" / "many15.png")
    folders = [as_rank(rank).folder for rank in (0, 3)]
    assert folders == [data.folder] * 2  # not theirs
    assert as_rank(1).folder != data.folder


def test_only_who_is_asked_to_tries_again(opened, tmp_path):
    picture = tmp_path / "data" / "images" / "1.png"
    picture.rename(tmp_path / "away.png")
    without = opened(max_bad_fraction=0.5)
    (tmp_path / "away.png").rename(picture)
    assert opened(max_bad_fraction=0.5, ranks=SECOND).fingerprint == without.fingerprint
    first = opened(max_bad_fraction=0.5)
    assert opened(max_bad_fraction=0.5, ranks=SECOND).fingerprint == first.fingerprint != without.fingerprint


def test_ranks_with_other_data_are_named(monkeypatch):
    ranks = Ranks(rank=2, local_rank=2, world_size=4, device=torch.device("cpu"))
    monkeypatch.setattr(dataset_module, "gather", lambda value, _: ["a", "b", value, "b"])
    with pytest.raises(DataError, match=r"ranks 1, 3 of 4 found other data than rank 0: .*--cache_dir"):
        check_same_data("a", ranks)
    monkeypatch.setattr(dataset_module, "gather", lambda value, _: [value] * 4)
    check_same_data("a", ranks)


def test_another_reason_is_no_reason_to_encode_anew_and_few_are_tried_at_once(opened, tmp_path, monkeypatch):
    records = [talk("<image>\nWho?", "yes", image=f"{i}.jpg") for i in range(40)] + [talk("Who?", "yes")]
    path, images = write(tmp_path / "many.json", records), tmp_path / "data" / "images"
    first = opened(data_path=path, max_bad_fraction=1.0)
    for i in range(10, 20):
        (images / f"{i}.jpg").write_bytes(b"no picture")
    monkeypatch.setattr(rows_module, "RECORDS_PER_CALL", 8)
    monkeypatch.setattr(shards, "RECORDS_PER_CALL", 8)
    tried, check = [], Checker.__call__
    monkeypatch.setattr(Checker, "__call__", lambda self, some: tried.append(len(some)) or check(self, some))
    assert opened(data_path=path, max_bad_fraction=1.0).folder == first.folder
    assert tried == [8] * 5
    Image.new("RGB", (30, 30)).save(images / "2.jpg")
    tried.clear()
    again = opened(data_path=path, max_bad_fraction=1.0)
    assert len(again) == 2 and tried[0] == 8 and sum(tried[1:]) == 41  # seen in the first part, and all encoded anew


@pytest.mark.parametrize(("aspect_ratio", "fast_decoding"), [("square", True), ("pad", False)])
def test_another_size_is_shown_where_the_tokens_stay(opened, tmp_path, aspect_ratio, fast_decoding):
    image_options = toys.image_options(aspect_ratio=aspect_ratio, fast_decoding=fast_decoding, max_pixels=5000)
    data = opened(images=image_options)
    picture = tmp_path / "data" / "images" / "1.png"
    Image.new("RGB", (90, 20), (9, 9, 9)).save(picture)
    assert len(data[1].input_ids) == data.lengths[1] and data[1].media[0][0].shape == (1, 3, 24, 24)
    Image.new("RGB", (4000, 1)).save(picture)
    assert isinstance(data[1], BrokenSample) and "4000 x 1" in data[1].reason


def test_data_with_a_changed_image_are_encoded_anew(opened, tmp_path):
    settings = {"images": toys.image_options(aspect_ratio="anyres", merge_type="spatial_unpad")}
    data = opened(**settings)
    picture = tmp_path / "data" / "images" / "1.png"
    Image.new("RGB", (90, 20)).save(picture)
    assert opened(**settings, ranks=SECOND).fingerprint == data.fingerprint  # looks at no rows
    again = opened(**settings)  # before anybody has come across it
    assert again.lengths[1] != data.lengths[1] and len(again[1].input_ids) == again.lengths[1]
    Image.new("RGB", (20, 90)).save(picture)
    data = again
    assert isinstance(data[1], BrokenSample) and "start again" in data[1].reason
    assert opened(**settings, ranks=SECOND).fingerprint == data.fingerprint
    again = opened(**settings)
    assert again.lengths[1] != data.lengths[1] and len(again[1].input_ids) == again.lengths[1]
    assert opened(**settings).folder == again.folder  # once


@pytest.mark.parametrize("gone", ["pictures.bin", ""])
def test_embedded_images_outlive_a_deleted_copy(opened, tmp_path, gone):
    uri = "data:image/png;base64," + base64.b64encode((tmp_path / "data" / "images" / "1.png").read_bytes()).decode()
    path = write(tmp_path / "inside.json", [talk("<image>\nWho?", "yes", image=uri)])
    first = opened(data_path=path)
    before = first[0].media[0][0]
    [spool] = (tmp_path / "c" / "pictures").iterdir()
    if gone:
        (spool / gone).unlink()
    else:
        shutil.rmtree(tmp_path / "c" / "pictures")
    again = opened(data_path=path)
    assert torch.equal(again[0].media[0][0], before) and again.fingerprint == first.fingerprint


def write_shard(path: Path, members: dict[str, bytes]) -> str:
    with tarfile.open(path, "w") as tar:
        for name, data in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return str(path)


def test_a_copied_shard_is_the_same_data_and_a_changed_one_is_not(opened, tmp_path):
    picture = (tmp_path / "data" / "images" / "1.png").read_bytes()
    members = {"a.png": picture, "a.txt": b"a cat", "b.png": picture, "b.txt": b"a dog"}
    first = opened(data_path=write_shard(tmp_path / "a.tar", members))
    shutil.copyfile(tmp_path / "a.tar", tmp_path / "copy.tar")
    os.utime(tmp_path / "copy.tar", ns=(1, 1))
    assert opened(data_path=str(tmp_path / "copy.tar")).fingerprint == first.fingerprint
    changes = [{"b.txt": b"a cow"}, {"b.png": picture + b"\0"}, {"c.txt": b"a dog"}]
    prints = [
        opened(data_path=write_shard(tmp_path / f"{i}.tar", {**members, **change}), max_bad_fraction=0.5).fingerprint
        for i, change in enumerate(changes)
    ]
    assert len({first.fingerprint, *prints}) == 4
    write_shard(tmp_path / "a.tar", {**members, "b.txt": b"a cow"})  # in the same place, as large
    os.utime(tmp_path / "a.tar", ns=(2, 2))
    assert opened(data_path=str(tmp_path / "a.tar")).fingerprint == prints[0]


def test_options_that_show_nowhere_are_not_in_the_fingerprint(opened, tmp_path):
    def prints(**settings) -> list[str]:
        changes = ({}, {"max_pixels": 999_999}, {"frames_upbound": 3}, {"pool_stride": 1})
        return [opened(**settings, images=toys.image_options(**change)).fingerprint for change in changes]

    assert len(set(prints())) == 1
    records = [talk("<video>\nWho?", "yes", video=["1.png"])]
    assert len(set(prints(data_path=write(tmp_path / "video.json", records)))) == 3


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
    monkeypatch.setattr(shards, "CHARS_PER_BATCH", 500)
    again = opened(data_path=path, cache_dir=tmp_path / "other")
    assert same(once, again) and sum(seen) == 40 and 1 <= min(seen) < max(seen) < 8


def test_a_part_is_held_back_the_same_one_for_a_seed(opened, tmp_path):
    whole = opened()
    rest, part = whole.without_part(0.4, seed=3)
    assert (len(rest), len(part)) == (3, 2)
    assert sorted([*rest.rows, *part.rows]) == list(whole.rows)
    for one in (rest, part):
        assert one.lengths.tolist() == [whole.lengths[list(whole.rows).index(row)] for row in one.rows]
        assert [len(one[i].input_ids) for i in range(len(one))] == one.lengths.tolist()
        assert one.num_rejected == whole.num_rejected == 0
    again, _ = opened().without_part(0.4, seed=3)
    assert again.fingerprint == rest.fingerprint and list(again.rows) == list(rest.rows)
    assert len({whole.fingerprint, rest.fingerprint, part.fingerprint}) == 3
    assert len({tuple(whole.without_part(0.4, seed)[1].rows) for seed in range(20)}) > 1
    assert [len(one) for one in whole.without_part(0.01, 0)] == [4, 1] and len(whole.without_part(0.99, 0)[0]) == 1
    with pytest.raises(DataError, match="there is only 1"):
        part.without_part(0.5, 0)[0].without_part(0.5, 0)


def picture_in(tmp_path: Path) -> Path:
    return sorted((tmp_path / "data" / "images").iterdir())[0]


def repainted(path: Path, size: tuple[int, int] | None = None) -> None:
    """Put another picture in the place of one."""
    with Image.open(path) as image:
        size = size or image.size
    Image.effect_noise(size, 80).convert("RGB").save(path)


def test_an_exchanged_image_is_other_data_whatever_its_time(opened, tmp_path):
    first, path = opened(), picture_in(tmp_path)
    before = path.stat()
    repainted(path)
    content = path.read_bytes()[: before.st_size].ljust(before.st_size, b"\0")
    path.write_bytes(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    again = opened()
    assert again.fingerprint != first.fingerprint
    assert opened(cache_dir=tmp_path / "other").fingerprint == again.fingerprint  # checked anew gives the same


def test_a_byte_in_a_large_image_is_other_data(opened, tmp_path):
    path = picture_in(tmp_path)
    Image.effect_noise((400, 400), 80).convert("RGB").save(path, "BMP")
    first, before, content = opened(), path.stat(), bytearray(path.read_bytes())
    assert len(content) > 400_000
    content[123_457] ^= 1  # in none of the blocks that are compared of a giant file
    path.unlink()
    path.write_bytes(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert opened().fingerprint != first.fingerprint


def test_copies_and_touched_files_are_the_same_data(opened, tmp_path, no_work):
    first = opened()
    shutil.copytree(tmp_path / "data", tmp_path / "copied", copy_function=shutil.copy)  # with new times
    moved = {"data_path": str(tmp_path / "copied" / "data.json"), "image_folder": str(tmp_path / "copied" / "images")}
    assert opened(**moved, cache_dir=tmp_path / "other").fingerprint == first.fingerprint
    for path in (tmp_path / "data" / "images").iterdir():
        os.utime(path, ns=(1, 1))
    no_work()
    assert opened().fingerprint == first.fingerprint


def test_a_sample_of_files_is_read_again_whatever_their_stamps(opened, tmp_path, monkeypatch):
    nowhen = seen_files.Stamp(1, 0, 0, 0)
    monkeypatch.setattr(seen_files, "stamp_of", lambda path: os.stat(path) and nowhen)
    first = opened()
    repainted(picture_in(tmp_path))
    assert opened().fingerprint != first.fingerprint


def test_inodes_of_64_bits_fit_the_table(opened, monkeypatch, no_work):
    """File systems that hash what they take inodes from give numbers beyond int64."""

    def hashed(path):
        found = os.stat(path)
        names = ("st_size", "st_mtime_ns", "st_ctime_ns")
        return SimpleNamespace(**{name: getattr(found, name) for name in names}, st_ino=2**64 - 1 - found.st_ino)

    monkeypatch.setattr(file_contents, "os", SimpleNamespace(**{**vars(os), "stat": hashed}))
    first = opened()
    no_work()
    assert opened().fingerprint == first.fingerprint


def test_the_files_that_changed_are_named(opened, tmp_path):
    first, path = opened(), picture_in(tmp_path)
    seen_files.write_data_files(tmp_path, first.table)
    assert seen_files.changes_since(first.table, tmp_path).startswith("no image file has changed")
    repainted(path)
    assert seen_files.changes_since(opened().table, tmp_path) == f"1 of 2 image files have other contents: {path}"
    path.unlink()
    assert seen_files.changes_since(opened(on_bad_sample="list").table, tmp_path).endswith(
        f"1 image files were read, 2 before; gone: {path}"
    )
    (tmp_path / f".{seen_files.FILE}.tmp").mkdir()  # what is in the way is said, and the list stays
    listed = (tmp_path / seen_files.FILE).read_bytes()
    with pytest.raises(IsADirectoryError, match=r"^\[Errno 21\] Is a directory: "):  # the system's words, not pyarrow's
        seen_files.write_data_files(tmp_path, opened(on_bad_sample="list").table)
    assert (tmp_path / seen_files.FILE).read_bytes() == listed
    for damage in (b"", b"PAR1" * 9):
        (tmp_path / seen_files.FILE).write_bytes(damage)
        assert seen_files.changes_since(first.table, tmp_path) == ""


def packed_record(path: Path, answer: str, shade: int) -> bytes:
    """A parquet table or a tar of one record with its picture inside; of one size for answers of one length."""
    image = io.BytesIO()
    Image.new("RGB", (24, 24), (shade, 0, 0)).save(image, "BMP")
    record = talk("<image>\nWhat is it?", answer, id="a")
    if path.suffix == ".parquet":
        row = {**record, "image": {"bytes": image.getvalue()}}
        pa.parquet.write_table(pa.Table.from_pylist([row]), path, compression="none", use_dictionary=False)
        return path.read_bytes()
    with tarfile.open(path, "w") as tar:
        for name, content in (("a.json", json.dumps(record).encode()), ("a.bmp", image.getvalue())):
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return path.read_bytes()


@pytest.mark.parametrize(("suffix", "shade"), [(".parquet", 250), (".tar", 250), (".tar", 10)])
def test_records_exchanged_with_their_files_time_restored_are_read_again(tmp_path, tokenizer, suffix, shade):
    """Those inside a table or a tar, and the pictures beside them."""
    path, found = tmp_path / f"data{suffix}", []
    second, first = packed_record(path, "two", shade), packed_record(path, "yes", 10)
    for content in (first, second):
        before = path.stat()
        assert len(content) == before.st_size
        path.write_bytes(content)
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        data = toys.encoded(data_path=str(path), image_folder=None, tokenizer=tokenizer, cache_dir=tmp_path / "c")
        sample = data[0]
        found.append((tokenizer.decode(sample.labels[sample.labels >= 0]), int(sample.media[0][0][0, 0].max())))
    assert [("yes" in text, "two" in text) for text, _ in found] == [(True, False), (False, True)]
    assert [seen for _, seen in found] == [10, shade]


def test_pixels_inside_a_tar_belong_to_the_data(tmp_path, tokenizer):
    toys.write_data(tmp_path / "data", "i")
    path, shard = picture_in(tmp_path), tmp_path / "shard.tar"
    record = json.dumps(talk("<image>\nWhat?", "A."))
    prints = []
    for _ in range(2):
        with tarfile.open(shard, "w") as tar:
            for name, content in (("a.json", record.encode()), ("a.bmp", as_bmp(path))):
                member = tarfile.TarInfo(name)
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
        os.utime(shard, ns=(1, 1))
        data = toys.encoded(data_path=str(shard), image_folder=None, tokenizer=tokenizer, cache_dir=tmp_path / "c")
        prints.append(data.fingerprint)
        repainted(path)
    assert prints[0] != prints[1]


def as_bmp(path: Path) -> bytes:
    """A picture in a format whose files of one size in pixels have one size in bytes."""
    with Image.open(path) as image, io.BytesIO() as file:
        image.save(file, "BMP")
        return file.getvalue()


def test_a_record_of_a_list_in_one_line_is_named_by_its_index(tmp_path, tokenizer):
    talk = [{"from": "human", "value": "Hello"}, {"from": "gpt", "value": "Hi."}]
    for indent, place in ((None, "data.json: record 1"), (1, "data.json:14: record 1")):
        (tmp_path / "data.json").write_text(json.dumps([{"conversations": talk}, {"conversations": []}], indent=indent))
        with pytest.raises(DataError) as caught:
            toys.encoded(str(tmp_path / "data.json"), None, tokenizer=tokenizer, cache_dir=tmp_path / str(indent))
        assert place in str(caught.value), str(caught.value)


def test_names_that_are_no_utf_8_are_read_and_can_be_printed(tmp_path, tokenizer):
    folder = tmp_path / os.fsdecode(b"\xff")
    data = toys.write_data(folder, "it")
    data["data_path"] = shutil.move(data["data_path"], folder / os.fsdecode(b"\xfe.json"))
    opened = toys.encoded(str(data["data_path"]), data["image_folder"], tokenizer=tokenizer, cache_dir=tmp_path / "c")
    "\n".join(opened.summary()).encode()
    assert len(opened) == 2 and all(len(opened[i].input_ids) == opened.lengths[i] for i in range(2))


def test_rows_that_are_added_accept_what_was_rejected(opened, tmp_path, tokenizer, no_work):
    """Another number of rows is another cache where it matters, and the same one where all tokens have rows."""
    records = [talk("What?", text) for text in ("a cat", "<grip> a cat", "<drop>")]
    data = {"data_path": write(tmp_path / "taught.json", records), "max_bad_fraction": 1.0}
    taught = AutoTokenizer.from_pretrained(tokenizer.name_or_path)
    taught.add_tokens(["<grip>", "<drop>"])
    counts = []
    for rows in (len(tokenizer), len(tokenizer) + 1, len(tokenizer) + 2, len(tokenizer) + 50):
        note_rows(taught, rows)
        found = opened(**data, tokenizer=taught)
        counts.append(len(found))
        reasons = [row["reason"] for row in found.rejections()]
        assert all(f"embedding has {rows} rows" in reason for reason in reasons)
        if rows == len(tokenizer):
            [line] = reasons_in_short(reasons)
            assert line.startswith("  2 x the text spells the token")
        if rows == len(tokenizer) + 2:
            whole = found
            no_work()  # nor with more rows than are needed
    assert counts == [1, 2, 3, 3] and found.folder == whole.folder and found.fingerprint == whole.fingerprint


def test_other_columns_are_in_the_cache_on_request_only(tmp_path, opened):
    """Another generation with the same samples; rejected records have none."""
    records = [
        talk("Hi?", "Yo.", solution=3),
        talk("Hi?", "Yo.", solution="\ud800", level="easy"),
        talk("Hi?", solution=1),
    ]
    path = write(tmp_path / "columns.json", records)
    plain, kept = (opened(data_path=path, on_bad_sample="list", other_columns=others) for others in (False, True))
    assert "other_columns" not in plain.table.column_names
    found = [text and json.loads(text) for text in kept.table.column("other_columns").to_pylist()]
    assert found == [{"solution": 3}, {"solution": "\ud800", "level": "easy"}, None]
    assert same(plain, kept) and plain.fingerprint == kept.fingerprint and plain.folder != kept.folder
    assert ["'solution'" in "\n".join(each.notes()) for each in (plain, kept)] == [True, False]
