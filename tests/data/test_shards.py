"""Processes of any number of machines encode one data set together, and go on with what a killed one left."""

import dataclasses
import gc
import importlib.util
import json
import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest
import torch
import toys
from launching import ROOT

from llava_ds.config.parsing import parse_arguments
from llava_ds.constants import DataError
from llava_ds.data import shards
from llava_ds.data.dataset import open_together
from llava_ds.data.preflight import Checker
from llava_ds.data.shards import Claims
from llava_ds.model.open.model_plan import plan_model
from llava_ds.runtime.output_lock import Process
from llava_ds.runtime.ranks import Ranks


@pytest.fixture
def opened(tmp_path, tokenizer, monkeypatch):
    """open_encoded on 300 records, a twentieth of them bad, in shards of 40; keywords replace its settings."""
    gc.collect()  # a process group that an earlier test left: its end, in a forked process, would wait for ever
    data = toys.write_data(tmp_path / "data", "itt" * 100)
    records = json.loads(Path(data["data_path"]).read_text())
    for record in records[::20]:
        record["conversations"] = "none"
    Path(data["data_path"]).write_text(json.dumps(records))
    monkeypatch.setattr(shards, "SHARD_RECORDS", 40)
    monkeypatch.setattr(shards, "RECORDS_PER_CALL", 16)
    settings = {"tokenizer": tokenizer, "cache_dir": tmp_path / "c", "num_workers": 1, "max_bad_fraction": 0.1}
    return lambda **changed: toys.encoded(**{**data, **settings, **changed})


def in_processes(function, number: int) -> list[int]:
    """Exit codes of so many processes that call a function with their number."""
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=function, args=(i,)) for i in range(number)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=60)
    return [process.exitcode for process in processes]


def files_of(generation: Path) -> set[str]:
    """Kinds of the files in a generation, but for the index of the samples."""
    return {path.suffix for path in generation.iterdir() if not path.name.startswith("index-")}


def same(one, other) -> bool:
    columns = [name for name in one.table.column_names if name != "stamps"]
    return one.fingerprint == other.fingerprint and all(one.table.column(n) == other.table.column(n) for n in columns)


def test_machines_share_the_work_and_get_the_rows_of_one(opened, tmp_path, monkeypatch):
    alone = opened()
    encode = shards._encode

    def noted(work, shard, *rest):
        with open(tmp_path / f"by-{os.getpid()}", "a") as file:
            file.write(f"{shard}\n")
        time.sleep(0.05)  # as long as real shards take: one process could be through before the other starts
        encode(work, shard, *rest)

    monkeypatch.setattr(shards, "_encode", noted)
    assert in_processes(lambda _: opened(cache_dir=tmp_path / "shared"), 2) == [0, 0]
    done = [path.read_text().split() for path in tmp_path.glob("by-*")]
    assert len(done) == 2 and sorted(int(shard) for each in done for shard in each) == list(range(8))  # each once
    monkeypatch.setattr(Checker, "__call__", None)
    together = opened(cache_dir=tmp_path / "shared")
    assert same(alone, together) and len(together.table) == 300
    assert files_of(together.folder) == {".arrow", ".json"} and not list(together.folder.parent.glob("*.work"))


@pytest.mark.full
@pytest.mark.parametrize("moment", ["records.write", "read", "shard 0", "shard 5", "half of a shard", "finish"])
def test_a_killed_encoding_is_continued_with_the_shards_that_are_there(opened, tmp_path, monkeypatch, moment):
    alone, cache_dir = opened(), tmp_path / "killed"
    tried: list[int] = []

    def until_killed(_) -> None:
        def die(*_):
            os.kill(os.getpid(), signal.SIGKILL)

        name, _, number = moment.partition(" ")
        if moment == "records.write":
            replace = os.replace
            monkeypatch.setattr(os, "replace", lambda a, b: die() if "records-000003" in str(b) else replace(a, b))
        elif moment == "read":
            monkeypatch.setattr(shards._Work, "finish", die)
            monkeypatch.setattr(shards, "_encode_next", die)
        elif name == "shard":
            encode = shards._encode
            monkeypatch.setattr(shards, "_encode", lambda w, s, *r: die() if s == int(number) else encode(w, s, *r))
        elif moment == "finish":
            monkeypatch.setattr(shards, "put_in_place", die)
        else:
            check, calls = Checker.__call__, []
            monkeypatch.setattr(
                Checker, "__call__", lambda s, p: die() if len(calls) > 7 else calls.append(1) or check(s, p)
            )
        opened(cache_dir=cache_dir)

    assert in_processes(until_killed, 1) == [-signal.SIGKILL]
    [work] = cache_dir.rglob("*.work")
    there = {int(path.name.split("-")[1]) for path in work.glob("rows-*")}
    assert len(there) == {"shard 5": 5, "half of a shard": 2, "finish": 8}.get(moment, 0)
    encode = shards._encode
    monkeypatch.setattr(shards, "_encode", lambda w, s, *r: tried.append(s) or encode(w, s, *r))
    again = opened(cache_dir=cache_dir)
    assert same(alone, again) and tried == sorted(set(range(8)) - there)
    assert files_of(again.folder) == {".arrow", ".json"}


def test_helpers_encode_and_their_errors_are_the_parents(opened, tmp_path, monkeypatch):
    assert same(opened(), opened(num_workers=3, cache_dir=tmp_path / "helped"))
    parent, check = os.getpid(), Checker.__call__

    def killed(checker, part):
        if os.getpid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)
        return check(checker, part)

    monkeypatch.setattr(Checker, "__call__", killed)
    with pytest.raises(DataError, match=r"was killed: .* smaller --preprocessing_num_workers"):
        opened(num_workers=2, cache_dir=tmp_path / "killed")

    def failing(checker, part):
        raise DataError("the reason")

    monkeypatch.setattr(Checker, "__call__", failing)
    with pytest.raises(DataError, match=r"^the reason$"):
        opened(num_workers=2, cache_dir=tmp_path / "failing")
    monkeypatch.setattr(Checker, "__call__", check)
    assert same(opened(), opened(num_workers=2, cache_dir=tmp_path / "killed"))


def test_a_claim_counts_while_its_process_lives(tmp_path, monkeypatch):
    ours, others = Claims(tmp_path), Claims(tmp_path)
    with ours.held("a"):
        assert ours.take("a") and not others.take("a") and others.take("b")
    assert others.take("a")  # it was released

    def dead(claims: Claims, **changes) -> None:
        claims._mine = dataclasses.replace(Process.current(), **changes)

    gone = Claims(tmp_path)
    dead(gone, started=1.0)  # another process that had this number
    assert gone.take("c") and ours.take("c") and not others.take("c")
    dead(gone, host="elsewhere", namespace="elsewhere")
    assert gone.take("d") and not ours.take("d")
    clock = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: clock + shards.SILENT_S - 1)
    assert not ours.take("d")
    os.utime(tmp_path / "d.claim", (5, 5))  # it is renewed, whatever clock the other machine has
    monkeypatch.setattr(time, "monotonic", lambda: clock + shards.SILENT_S + 1)
    assert not ours.take("d")
    monkeypatch.setattr(time, "monotonic", lambda: clock + 2 * shards.SILENT_S + 2)
    assert ours.take("d")
    (tmp_path / "e.claim").write_text("")  # cut short
    assert not ours.take("e")
    monkeypatch.setattr(time, "monotonic", lambda: clock + 3 * shards.SILENT_S + 3)
    assert ours.take("e")


def test_the_newest_generation_counts_and_the_one_before_stays(opened, tmp_path):
    folders = []
    for i in range(4):
        if folders:
            (folders[-1] / "stale").touch()
        folders.append(opened().folder)
        (folders[-1].parent / f"{i}.work").mkdir(exist_ok=True)  # of a start that was killed
    assert [folder.name for folder in folders] == ["1", "2", "3", "4"]
    assert sorted(path.name for path in folders[0].parent.iterdir()) == ["3", "3.work", "4"]


def test_a_generation_without_one_of_its_files_does_not_count(opened):
    first = opened()
    next(first.folder.glob("rows-000002-*")).unlink()
    again = opened()
    assert again.folder != first.folder and again.fingerprint == first.fingerprint


def test_encode_fills_the_cache_that_training_opens(tmp_path, toy_base, capsys, monkeypatch):
    data = toys.write_data(tmp_path / "d", "itti")
    flags = {**toy_base, **data, "cache_dir": str(tmp_path / "cache"), "model_max_length": "512", "version": "v1"}
    spec = importlib.util.spec_from_file_location("encode", ROOT / "run" / "encode.py")
    encode = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(encode)
    encode.main([token for name, value in flags.items() for token in (f"--{name}", value)])
    assert "4 records: 4 accepted, 0 rejected" in (printed := capsys.readouterr().out)
    args, _ = parse_arguments(
        [token for name, value in flags.items() for token in (f"--{name}", value)], to_train=False
    )
    plan = plan_model(args.model, args.data.model_max_length)
    monkeypatch.setattr(Checker, "__call__", None)  # nothing is left to do
    ranks = Ranks(rank=0, local_rank=0, world_size=1, device=torch.device("cpu"))
    assert open_together(args, plan.tokenizer, plan.tower.image_options(args), ranks).fingerprint in printed
