"""Data of an object store are those of a disk: the same records, fingerprint and books."""

import json
import tarfile
from pathlib import Path

import fsspec
import pyarrow as pa
import pyarrow.parquet
import pytest
import stores
import toys
import yaml
from read_data import read_samples

from llava_ds.constants import ConfigError, DataError
from llava_ds.data.dataset import BrokenSample
from llava_ds.data.sources import SourceOptions, open_sources, to_sample
from llava_ds.extensions.object_store import store as object_store
from llava_ds.extensions.object_store.flags import configure

KINDS = "titti"


@pytest.fixture
def given(tmp_path, monkeypatch):
    """The flags of toy data in a store."""
    return toys.write_data(stores.prepare(tmp_path, monkeypatch), KINDS)


def remote(given: dict[str, str]) -> dict[str, str]:
    return {name: stores.url_of(path) for name, path in given.items()}


def write_forms(folder: Path) -> dict[str, dict[str, str]]:
    """Toy data in every form: what --data_path and --image_folder are, relative to the folder."""
    data = toys.write_data(folder, KINDS)
    records = json.loads(Path(data["data_path"]).read_text())
    (folder / "lines.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (folder / "tables").mkdir()
    rows = [{"id": r["id"], "conversations": r["conversations"], "image": _bytes(folder, r)} for r in records]
    pa.parquet.write_table(pa.Table.from_pylist(rows), folder / "tables" / "train-0.parquet")
    for number in range(2):
        with tarfile.open(folder / f"shard-{number}.tar", "w") as tar:
            for record in records[number::2]:
                path = folder / "one.json"
                path.write_text(json.dumps(record))
                tar.add(path, f"{record['id']}.json")
                if "image" in record:
                    tar.add(folder / "images" / record["image"], f"{record['id']}.png")
    entries = [{"path": "lines.jsonl", "image_folder": "images", "weight": 2}, {"path": "shard-0.tar"}]
    (folder / "mixture.yaml").write_text(yaml.safe_dump({"datasets": entries}))
    images = {"image_folder": "images"}
    return {
        "list": {"data_path": "data.json", **images},
        "lines": {"data_path": "lines.jsonl", **images},
        "tables": {"data_path": "tables"},
        "tars": {"data_path": "shard-*.tar"},
        "braces": {"data_path": "shard-{0,1}.tar"},
        "mixture": {"data_path": "mixture.yaml"},
    }


def _bytes(folder: Path, record: dict) -> bytes | None:
    return (folder / "images" / record["image"]).read_bytes() if "image" in record else None


def test_every_form_is_the_same_data_in_memory_as_on_the_disk(tmp_path, tokenizer, monkeypatch):
    stores.prepare(tmp_path, monkeypatch)
    forms = write_forms(tmp_path / "forms")
    files = fsspec.filesystem("memory")
    for path in (tmp_path / "forms").rglob("*"):
        if path.is_file():
            files.pipe(f"/forms/{path.relative_to(tmp_path / 'forms')}", path.read_bytes())
    for form, flags in forms.items():
        opened = []
        for root in (str(tmp_path / "forms"), "memory://forms"):
            paths = {"image_folder": None, **{name: f"{root}/{value}" for name, value in flags.items()}}
            opened.append(toys.encoded(**paths, tokenizer=tokenizer, cache_dir=tmp_path / "c" / root.partition(":")[0]))
        local, there = opened
        assert there.fingerprint == local.fingerprint and len(there) == len(local) > 2, form
        for one, other in zip(local, there):
            tiles = [[each[0] for each in sample.media] for sample in (one, other)]
            assert all((a == b).all() for a, b in zip(*tiles, strict=True)), form
        assert sum(bool(sample.media) for sample in there) >= 1, form


def test_a_second_start_fetches_nothing(given, tmp_path, tokenizer):
    settings = {**remote(given), "tokenizer": tokenizer, "cache_dir": tmp_path / "c"}
    first = toys.encoded(**settings)
    assert not any(isinstance(sample, BrokenSample) for sample in first)
    fetched = stores.fetched()
    assert len(fetched) == len(set(fetched)) == 1 + KINDS.count("i")
    second = toys.encoded(**settings)
    assert [len(sample.media) for sample in second] == [kind == "i" for kind in KINDS]
    assert stores.fetched() == fetched and second.fingerprint == first.fingerprint
    assert first.fingerprint == toys.encoded(**{**settings, **given}).fingerprint


def test_a_missing_object_is_a_bad_record_until_it_is_there(given, tmp_path, tokenizer):
    settings = {**remote(given), "tokenizer": tokenizer, "cache_dir": tmp_path / "c", "max_bad_fraction": 0.5}
    image = Path(given["image_folder"]) / "1.png"
    image.rename(tmp_path / "1.png")
    data = toys.encoded(**settings)
    [row] = data.rejections()
    assert row["id"] == "s1" and f"{stores.url_of(image)} can't be read: this object does not exist" in row["reason"]
    (tmp_path / "1.png").rename(image)
    assert toys.encoded(**settings).num_rejected == 0


def test_a_replaced_image_is_other_data(given, tmp_path, tokenizer):
    settings = {**remote(given), "tokenizer": tokenizer, "cache_dir": tmp_path / "c"}
    first = toys.encoded(**settings)
    images = Path(given["image_folder"])
    (images / "1.png").write_bytes((images / "4.png").read_bytes())
    assert toys.encoded(**settings).fingerprint != first.fingerprint


def test_a_store_that_fails_in_training_costs_a_sample(given, tmp_path, tokenizer, monkeypatch):
    data = toys.encoded(**remote(given), tokenizer=tokenizer, cache_dir=tmp_path / "c")
    configure(tmp_path / "other", 10**9, allow_http=False)
    stores.state("failures").write_text(str(object_store.TRIES))
    broken = data[1]
    assert isinstance(broken, BrokenSample) and "the store failed 6 times" in broken.reason
    assert not isinstance(data[1], BrokenSample), "the store works again"
    (Path(given["image_folder"]) / "4.png").unlink()
    configure(tmp_path / "third", 10**9, allow_http=False)
    assert isinstance(data[4], BrokenSample) and "this object does not exist" in data[4].reason


def test_records_that_leave_the_folder_are_refused(given):
    path = Path(given["data_path"])
    records = json.loads(path.read_text())
    for name in ("../data.json", "/etc/passwd", "s3://bucket/1.png", "file:///etc/passwd"):
        path.write_text(json.dumps([{**records[1], "image": name}]))
        with pytest.raises(DataError, match="outside the image folder"):
            read_samples(**{"path": stores.url_of(path), "image_folder": remote(given)["image_folder"]})


def test_sources_that_can_t_be_read_are_named(given, tmp_path, monkeypatch):
    options = SourceOptions(cache_dir=str(tmp_path / "c"))
    with pytest.raises(ConfigError, match="give --allow_http True"):
        open_sources("https://host/data.json", options)
    with pytest.raises(ConfigError, match="no such file"):
        open_sources(stores.url_of(tmp_path / "nothing.json"), options)
    stores.state("failures").write_text("1000")
    with pytest.raises(
        DataError, match=r"the store failed 6 times, the last time with TimeoutError: 503.*the store has"
    ):
        open_sources(remote(given)["data_path"], options)


def test_folders_have_splits(tmp_path, monkeypatch):
    folder = stores.prepare(tmp_path, monkeypatch) / "d"
    (folder / "data").mkdir(parents=True)
    for split in ("train", "testmini"):
        record = {"question": "Which file?", "answer": split}
        (folder / "data" / f"{split}.jsonl").write_text(json.dumps(record) + "\n")
    url = stores.url_of(folder)
    with pytest.raises(ConfigError, match=r"'train' \(data/train.jsonl\) and 'testmini' \(data/testmini.jsonl\)"):
        open_sources(url, SourceOptions(cache_dir=str(tmp_path / "c")))
    [source] = open_sources(url, SourceOptions(split="testmini", cache_dir=str(tmp_path / "c")))
    assert [to_sample(record.text, source, 0).messages[1].text for record in source.read()] == ["testmini"]
