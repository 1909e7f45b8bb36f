"""Runs from an object store: the losses of the disk's, each object fetched once, also while the store fails."""

import json
from pathlib import Path

import pytest
import stores
import toys
from launching import command_line, ds_config, launch, losses, toy_run

# The store's cases are tested in one process in tests/files and tests/data; here it meets ranks and loader workers.
pytestmark = pytest.mark.long

WORKER = Path(__file__).parent / "on_store.py"
STEPS = 6


def test_two_ranks_train_from_a_store_as_from_the_disk(tmp_path, monkeypatch):
    folder = stores.prepare(tmp_path, monkeypatch)
    local = toys.write_data(folder, "itti" * 8)
    remote = {name: stores.url_of(path) for name, path in local.items()}
    base = toys.write_base(tmp_path / "base")
    common = {"max_steps": STEPS, "dataloader_num_workers": 2, "logging_steps": 1}

    def flags(name: str, data: dict[str, str], cache: str) -> dict[str, object]:
        more = {**common, "cache_dir": tmp_path / cache}
        return toy_run(base | data, tmp_path / name, ds_config(2), **more)

    small = {**flags("small", remote, "c3"), "object_cache_gb": 5 * 4096 / 10**9}
    again = flags("again", remote, "c2")
    first = [flags("local", local, "c1"), small, flags("remote", remote, "c2")]
    stores.state("failures").write_text("4")  # fewer than the tries of one request
    fetched = []
    for runs in (first, [again]):
        listed = tmp_path / "runs.json"
        listed.write_text(json.dumps([command_line(run) for run in runs]))
        done = launch(2, WORKER, str(listed), timeout_s=600)
        assert done.returncode == 0, done.stdout + done.stderr
        fetched.append(stores.fetched())
    runs = [*first, again]
    expected = losses(tmp_path / "local")
    assert len(expected) == STEPS
    assert all(losses(tmp_path / name) == expected for name in ("remote", "again", "small"))
    assert fetched[0] == fetched[1], "a second start fetched something again"
    assert set(fetched[1]) == {local["data_path"], *map(str, Path(local["image_folder"]).iterdir())}
    assert stores.state("failures").read_text() == "0"
    assert not any((run["output_dir"] / "run" / "skipped.jsonl").exists() for run in runs)
    prints = [json.loads((run["output_dir"] / "run" / "run.json").read_text())["data"]["fingerprint"] for run in runs]
    assert len(set(prints)) == 1
    kept = [path for path in (tmp_path / "c3" / "objects").rglob("*") if path.is_file() and path.name != "ledger"]
    assert 0 < len(kept) <= 5 + 2 * 3  # of the bound, and one for each process
