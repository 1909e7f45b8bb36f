"""Resuming at hundreds of ranks: settings are compared before files are hashed, and each rank hashes a share."""

import dataclasses
import json
import threading
from pathlib import Path

import pytest
import torch

from llava_ds.checkpoint import commit, resume, verification
from llava_ds.checkpoint.commit import TRAINER
from llava_ds.checkpoint.resume import find_resume_point
from llava_ds.checkpoint.run_identity import RunIdentity
from llava_ds.checkpoint.trainer_file import resume_problem
from llava_ds.config.arguments import Arguments, DataArguments, ModelArguments, TrainingArguments
from llava_ds.constants import ConfigError
from llava_ds.files import writing
from llava_ds.runtime.ranks import Ranks

ONE = Ranks(0, 0, 1, torch.device("cpu"))
NUM_RANKS = 4


def identity(**flags) -> RunIdentity:
    args = Arguments(ModelArguments(), DataArguments(), TrainingArguments(), frozenset())
    args = args.replaced(**{"train_batch_size": 4, "output_dir": "out", **flags})
    return RunIdentity.of(args, "data", NUM_RANKS, {"zero_optimization": {"stage": 3}})


def save(folder: Path, step: int, of: RunIdentity) -> Path:
    """A checkpoint with the files of NUM_RANKS ranks and of two that no longer exist."""
    scratch = commit.begin(folder, step, ONE)
    (scratch / TRAINER).write_text(json.dumps({"step": step, "identity": dataclasses.asdict(of)}))
    for rank in range(NUM_RANKS + 2):
        (scratch / f"layout-{rank}.json").write_text("{}")
        (scratch / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt").write_bytes(bytes(10_000))
    return commit.commit(scratch, {}, None, ONE)


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


@pytest.fixture
def hashed(monkeypatch) -> list[str]:
    """The names of the files that were hashed."""
    names, hash_file = [], writing.sha256
    monkeypatch.setattr(writing, "sha256", lambda path: names.append(path.name) or hash_file(path))
    return names


def on_ranks(monkeypatch, act) -> list:
    """The function's value, or its error, on each of NUM_RANKS ranks, which exchange values between threads."""
    meeting, values = threading.Barrier(NUM_RANKS, timeout=20), {}

    def gather(value: object, ranks: Ranks) -> list:
        values[ranks.rank] = value
        meeting.wait()
        found = [values[rank] for rank in range(NUM_RANKS)]
        meeting.wait()
        return found

    def broadcast(ranks: Ranks, compute):
        value, error = None, None
        if ranks.is_first:
            try:
                value = compute()
            except ConfigError as raised:
                error = raised
        value, error = gather((value, error), ranks)[0]
        if error is not None:
            raise error
        return value

    for module in (commit, verification):
        monkeypatch.setattr(module, "gather", gather)
    monkeypatch.setattr(resume, "broadcast_from_first", broadcast)
    results = [None] * NUM_RANKS

    def run(rank: int) -> None:
        try:
            results[rank] = act(Ranks(rank, rank, NUM_RANKS, torch.device("cpu")))
        except ConfigError as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(NUM_RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return results


def test_other_settings_are_refused_before_anything_is_hashed(tmp_path, hashed):
    for step in (2, 4):
        save(tmp_path, step, identity())
    hashed.clear()
    with pytest.raises(ConfigError, match="checkpoint-4 is from a run with other settings"):
        find_resume_point("auto", tmp_path, identity(learning_rate=1.0))
    assert hashed == []
    assert find_resume_point("auto", tmp_path, identity())[0].step == 4 and len(hashed) == 2 * (NUM_RANKS + 2) + 1


def test_an_older_checkpoint_with_the_runs_settings_is_used_if_the_newest_is_damaged(tmp_path):
    save(tmp_path, 2, identity())
    newest = save(tmp_path, 4, identity(learning_rate=1.0))
    with pytest.raises(ConfigError, match="checkpoint-4 is from a run with other settings"):
        find_resume_point("auto", tmp_path, identity())
    flip(newest / "layout-1.json")
    point, lines = find_resume_point("auto", tmp_path, identity())
    assert point.step == 2 and lines[0] == "checkpoint-4 is not used: layout-1.json has changed since it was saved"


def test_each_rank_hashes_its_own_files_once_and_those_of_gone_ranks_are_shared(tmp_path, hashed, monkeypatch):
    path = save(tmp_path, 4, identity())
    files = verification.read_manifest(path)
    for rank, share in enumerate(verification.shares(files, NUM_RANKS)):
        assert {f"layout-{rank}.json", f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"} <= set(share)
    loads = [sum(files[name]["bytes"] for name in share) for share in verification.shares(files, NUM_RANKS)]
    assert min(loads) >= 10_002 and max(loads) < 20_100  # two of four have a gone rank's file, too
    hashed.clear()
    points = on_ranks(monkeypatch, lambda ranks: find_resume_point("auto", tmp_path, identity(), ranks=ranks))
    assert [point.path for point, _ in points] == [path] * NUM_RANKS
    assert sorted(hashed) == sorted(files)


def test_damage_that_one_rank_finds_is_agreed_on_in_the_same_words(tmp_path, monkeypatch):
    older, newest = save(tmp_path, 2, identity()), save(tmp_path, 4, identity())
    for rank in (5, 3, 1):
        flip(newest / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    alone = f"checkpoint-4 is not used: {resume_problem(newest)}"
    found = on_ranks(monkeypatch, lambda ranks: find_resume_point("auto", tmp_path, identity(), ranks=ranks))
    assert [(point.path, lines[0]) for point, lines in found] == [(older, alone)] * NUM_RANKS
    named = on_ranks(monkeypatch, lambda ranks: find_resume_point(str(newest), tmp_path, identity(), ranks=ranks))
    assert {str(error) for error in named} == {f"--resume {newest} can't be used: {resume_problem(newest)}"}
