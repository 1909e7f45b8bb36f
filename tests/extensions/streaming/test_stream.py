"""A data set that is read while it is encoded: its order, its places for bad records, and the end of the encoding."""

import gc
import itertools
import json
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import toys

from llava_ds.config.arguments import Arguments, DataArguments, ModelArguments, TrainingArguments
from llava_ds.constants import DataError
from llava_ds.data import shards
from llava_ds.data.dataset import ALONE, BrokenSample, DataSpec, PreflightOptions
from llava_ds.data.heaviest import heaviest
from llava_ds.data.sample_order import SampleOrder, by_shards, shards_in_order
from llava_ds.data.sources import SourceOptions, open_sources
from llava_ds.data.step_plan import Packing, StepPlan
from llava_ds.extensions.streaming.streamed_dataset import StreamedDataset, streamed
from llava_ds.model.open.model_plan import read_parts

SIZE, NUMBER, BAD = 8, 44, (3, 17, 40)  # records of a shard, all records, and those that are rejected


@pytest.fixture
def spec(tmp_path, tokenizer, monkeypatch):
    gc.collect()  # a process group that an earlier test left: its end, in a forked process, would wait for ever
    data = toys.write_data(tmp_path / "data", "it" * (NUMBER // 2))
    records = json.loads(Path(data["data_path"]).read_text())
    for i in BAD:
        records[i]["conversations"] = "none"
    Path(data["data_path"]).write_text(json.dumps(records))
    monkeypatch.setattr(shards, "SHARD_RECORDS", SIZE)
    sources = open_sources(
        data["data_path"], SourceOptions(image_folder=data["image_folder"], cache_dir=str(tmp_path / "cache"))
    )
    options = PreflightOptions(cache_dir=str(tmp_path / "cache"), num_workers=1, on_bad_sample="list")
    return DataSpec.of(sources, tokenizer, toys.encoding_options(), toys.image_options(), options)


def whole(spec: DataSpec) -> StreamedDataset:
    spec.encode(1)
    return StreamedDataset(spec, 1, NUMBER)


def test_the_order_takes_whole_shards_and_shuffles_some_of_them_together():
    sizes = [10, 10, 0, 10, 10, 3]
    order = by_shards(sizes, 2, seed=5, epoch=0)
    assert sorted(order.tolist()) == list(range(43))
    owner, first = np.repeat(range(6), sizes), 0
    in_turn = shards_in_order(6, seed=5, epoch=0)
    for pair in itertools.batched(in_turn, 2) if hasattr(itertools, "batched") else zip(in_turn[::2], in_turn[1::2]):
        count = sum(sizes[shard] for shard in pair)
        assert set(owner[order[first : first + count]]) == {shard for shard in pair if sizes[shard]}
        first += count
    assert not np.array_equal(order, np.sort(order)) and not np.array_equal(order, by_shards(sizes, 2, 5, 1))
    assert np.array_equal(SampleOrder(43, 4, 5, "shards", sizes, shuffled_together=2).epoch(0), order)


def test_shards_are_encoded_in_the_order_in_which_training_takes_them(spec, monkeypatch):
    done, encode = [], shards._encode
    monkeypatch.setattr(shards, "_encode", lambda work, shard, *rest: (done.append(shard), encode(work, shard, *rest)))
    spec.encode(1, lambda number: shards_in_order(number, seed=3, epoch=0))
    assert done == shards_in_order(6, seed=3, epoch=0).tolist() != sorted(done)


def test_a_bad_record_leaves_its_place_empty(spec):
    data = whole(spec)
    data.wait_for(range(NUMBER))
    assert np.flatnonzero(data.lengths == 1).tolist() == list(BAD) and data.lengths.min() == 1
    broken = data[BAD[1]]
    assert isinstance(broken, BrokenSample) and "conversations" in broken.reason and broken.index == BAD[1]
    in_all, _ = data.encoded(ALONE)
    accepted = [i for i in range(NUMBER) if i not in BAD]
    assert in_all.rows.tolist() == accepted
    assert all(np.array_equal(one, other[accepted]) for one, other in zip(in_all.sizes, data.sizes))
    for sample, record in enumerate(accepted):
        assert in_all[sample].input_ids.tolist() == data[record].input_ids.tolist()
    assert {row["index"] for row in in_all.rejections()} == set(BAD)


def test_held_out_records_are_the_same_before_and_after_the_encoding(spec):
    early = StreamedDataset(spec, 1, NUMBER).without_part(0.3, seed=2)
    data = whole(spec)
    late = data.without_part(0.3, seed=2)
    for one, other in zip(early, late):
        assert np.array_equal(one.rows, other.rows) and one.fingerprint == other.fingerprint
        _, part = other.encoded(ALONE)
        assert part.rows.tolist() == [row for row in other.rows if row not in BAD]
    assert sorted([*early[0].rows, *early[1].rows]) == list(range(NUMBER)) and len(early[1]) == 13
    assert early[0].lengths_for("shards").sum() == len(early[0])


def test_images_that_change_between_two_starts_make_other_data(spec, tmp_path, monkeypatch):
    encode = shards._encode

    def until_three(work, shard, *rest) -> None:
        if shard == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        encode(work, shard, *rest)

    def opened() -> StreamedDataset:
        data = streamed(spec, range, ALONE)
        with pytest.raises(DataError, match="was killed"):
            data.wait_for([NUMBER - 1])
        return data

    monkeypatch.setattr(shards, "_encode", until_three)
    first = opened()
    assert len(shards.encoded_shards(spec.folder, 1)) == 3 and opened().fingerprint == first.fingerprint
    image = tmp_path / "data" / "images" / "2.png"
    image.write_bytes(image.read_bytes() + b"more")
    changed = opened()
    assert changed.fingerprint != first.fingerprint == StreamedDataset(spec, 1, NUMBER).fingerprint
    assert opened().fingerprint == changed.fingerprint
    monkeypatch.setattr(shards, "_encode", encode)
    in_all, _ = streamed(spec, range, ALONE).encoded(ALONE)
    assert in_all.folder.name == "2" and streamed(spec, range, ALONE).fingerprint == changed.fingerprint


@pytest.mark.parametrize("tokens", [None, 300])
def test_a_step_waits_for_its_shards_alone(spec, monkeypatch, tokens):
    data = StreamedDataset(spec, 1, NUMBER)
    order = SampleOrder(NUMBER, 4, 1, "shards", data.lengths_for("shards"), shuffled_together=2)
    plan = StepPlan(data, order, Packing(2, 2, 1, tokens), num_steps=11)
    work = shards._Work(spec.folder, 1)
    for _ in shards._read_shards(work, spec.checker.sources):
        pass
    in_turn, waits = shards_in_order(6, seed=1, epoch=0).tolist(), []

    def encode_one(_) -> None:
        waits.append(len(shards.encoded_shards(spec.folder, 1)))
        shards._encode(work, in_turn[waits[-1]], spec.checker, lambda: None)
        if len(waits) == 6:
            work.finish(work.state())

    monkeypatch.setattr(time, "sleep", encode_one)
    seen, before = [], []
    for layout in plan.after(0):
        seen += layout.samples
        before.append(len(waits))
        assert sorted(sample for rank in layout.of_ranks for micro in rank for sample in micro) == sorted(
            layout.samples
        )
        assert all(data[sample] is not None for sample in layout.samples)
    assert sorted(seen) == list(range(NUMBER)) and before[0] == 2 and before[-1] == 6 and waits == list(range(6))
    again = StepPlan(StreamedDataset(spec, 1, NUMBER), order, plan.packing, num_steps=11)
    assert [layout.of_ranks for layout in again.after(0)] == [layout.of_ranks for layout in plan.after(0)]


def test_the_largest_micro_batch_is_made_of_what_the_next_step_needs(spec):
    data = whole(spec)
    order = SampleOrder(NUMBER, 4, 1, "shards", data.lengths_for("shards"), shuffled_together=1)
    for tokens in (None, 400):
        plan = StepPlan(data, order, Packing(2, 2, 1, tokens), num_steps=11)
        found = heaviest(plan, 0)
        longest = sorted(data.lengths[data.lengths > 0])
        assert data.lengths[found].sum() >= (sum(longest[-2:]) if tokens is None else tokens), tokens
        assert heaviest(plan, 11) == []


def killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def refused() -> None:
    raise DataError("no such table")


@pytest.mark.parametrize(
    ("end", "reason"), [(killed, "was killed: this machine may be out of memory"), (refused, "no such")]
)
def test_the_end_of_the_encoding_ends_the_wait_for_it(spec, end, reason):
    data = StreamedDataset(spec, 1, NUMBER, shards.EncodingBeside(end))
    with pytest.raises(DataError, match=reason):
        data.wait_for([0])


def test_the_encoding_beside_ends_with_the_process_that_started_it(spec, tmp_path, monkeypatch):
    note = tmp_path / "pid"

    def endless() -> None:
        note.write_text(str(os.getpid()))
        time.sleep(600)

    child = os.fork()
    if child == 0:
        shards.EncodingBeside(endless)
        time.sleep(600)
    while not (note.exists() and note.read_text()):
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    deadline = time.monotonic() + 10
    while Path(f"/proc/{note.read_text()}").exists() and "Z" not in _state(int(note.read_text())):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1]
    except FileNotFoundError:
        return "Z"


@pytest.mark.full
def test_videos_of_a_ready_model_are_streamed(tmp_path):
    """Their tokens and tiles are those of data that is encoded before."""
    write_ready = pytest.importorskip("ready_models").write_ready
    write_ready(tmp_path / "model", "smolvlm")
    parts = read_parts(ModelArguments(model_name_or_path=str(tmp_path / "model")))
    options = parts.tower.image_options(Arguments(ModelArguments(), DataArguments(), TrainingArguments(), frozenset()))
    data = toys.write_data(tmp_path / "data", "ivtv")
    sources = open_sources(
        data["data_path"], SourceOptions(image_folder=data["image_folder"], cache_dir=str(tmp_path / "cache"))
    )
    both = []
    for name in ("streamed", "before"):
        given = PreflightOptions(cache_dir=str(tmp_path / name), num_workers=1)
        encoding = toys.encoding_options(template="processor")
        both.append(DataSpec.of(sources, parts.open_tokenizer(), encoding, options, given))
    data, before = streamed(both[0], range, ALONE), both[1].open(ALONE)
    data.wait_for(range(4))
    assert data.lengths.tolist() == before.lengths.tolist()
    for one, other in zip((data[i] for i in range(4)), (before[i] for i in range(4))):
        assert one.input_ids.tolist() == other.input_ids.tolist()
        assert [layout.is_video for _, layout in one.media] == [layout.is_video for _, layout in other.media]
        assert all(mine.equal(theirs) for (mine, _), (theirs, _) in zip(one.media, other.media))
    assert [layout.is_video for _, layout in data[1].media] == [True]


def test_answers_of_several_weights_are_weighed_as_in_the_whole_data_set(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr(shards, "SHARD_RECORDS", 4)
    files = toys.write_data(tmp_path / "data", "tttttt")
    path = Path(files["data_path"])
    records = json.loads(path.read_text())
    for record in records[::2]:
        record["conversations"][-1]["weight"] = 0.5
    path.write_text(json.dumps(records))
    sources = open_sources(str(path), SourceOptions(image_folder=files["image_folder"], cache_dir=str(tmp_path)))
    options = PreflightOptions(cache_dir=str(tmp_path / "streamed"), num_workers=1)
    spec = DataSpec.of(sources, tokenizer, toys.encoding_options(), toys.image_options(), options)
    spec.encode(1)
    found, whole = StreamedDataset(spec, 1, len(records)), spec.open(ALONE)
    weights = [found[i].weights for i in range(len(records))]
    assert [each is None for each in weights] == [whole[i].weights is None for i in range(len(records))]
    assert all(each is None or torch.equal(each, whole[i].weights) for i, each in enumerate(weights))
    assert any(each is not None for each in weights)
