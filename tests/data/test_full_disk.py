"""A disk that is full or fails: one message, nothing half-written that a later run takes for whole."""

import errno
import io
import json
import os
import re
import resource
import signal

import pyarrow as pa
import pyarrow.parquet
import pytest
import toys
from PIL import Image

from llava_ds.constants import ConfigError, DataError
from llava_ds.data import shards
from llava_ds.data.file_slices import read_errors
from llava_ds.data.sources import source as source_module
from llava_ds.tiny.scene_files import write_dataset


def in_child(function, limit: int | None) -> str:
    """What a function returns in a process that may not write files beyond so many bytes."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        try:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # writing gives EFBIG, as a full disk gives ENOSPC
            if limit is not None:
                resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
            answer = function()
        except BaseException as error:
            answer = f"{type(error).__name__}: {error}"
        os.write(writing, answer.encode()[:60_000])
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        answer = pipe.read().decode()
    os.waitpid(child, 0)
    return answer


def embedded(folder) -> str:
    """A table with the pictures inside its rows."""
    image = io.BytesIO()
    Image.effect_noise((60, 60), 90).save(image, "PNG")
    talk = [{"from": "human", "value": "<image>\nWhat?"}, {"from": "gpt", "value": "Noise."}]
    rows = [{"id": str(i), "image": {"bytes": image.getvalue()}, "conversations": talk} for i in range(20)]
    pa.parquet.write_table(pa.Table.from_pylist(rows), folder / "data.parquet")
    return str(folder / "data.parquet")


@pytest.mark.parametrize("kind", ["json", "parquet"])
def test_a_full_disk_is_one_message_and_leaves_nothing_that_counts(tmp_path, tokenizer, kind):
    data = toys.write_data(tmp_path / "data", "itti" * 10)
    if kind == "parquet":
        data = {"data_path": embedded(tmp_path), "image_folder": data["image_folder"]}

    def opened() -> str:
        return toys.encoded(**data, tokenizer=tokenizer, cache_dir=tmp_path / "cache", num_workers=1).fingerprint

    outcomes = [in_child(opened, limit) for limit in (0, 50, 500, 4_000, 20_000, 60_000)]
    refused = [outcome for outcome in outcomes if outcome.startswith("ConfigError: ")]
    assert len(refused) >= 4, outcomes
    assert all("can't be written to" in one and "another --cache_dir" in one and "\n" not in one for one in refused)
    whole = in_child(opened, None)
    assert in_child(opened, None) == whole and len(whole) == 20
    assert set(outcomes) - set(refused) <= {whole}
    assert whole == in_child(
        lambda: toys.encoded(**data, tokenizer=tokenizer, cache_dir=tmp_path / "other", num_workers=1).fingerprint, None
    )


def test_scenes_on_a_full_disk_are_one_message_and_made_anew(tmp_path):
    counts = {"num_pretrain": 6, "num_finetune": 6, "num_heldout": 6}

    def made() -> str:
        write_dataset(tmp_path / "scenes", **counts)
        return "made"

    for limit in (0, 300, 2_000):
        outcome = in_child(made, limit)
        assert outcome.startswith("ConfigError: the generated scenes can't be written to"), outcome
        assert not (tmp_path / "scenes").exists()
    assert in_child(made, None) == "made"


@pytest.mark.parametrize(
    ("number", "said"),
    [
        ("EMFILE", "can't be created: Too many open files: raise the limit (ulimit -n)"),
        ("ENFILE", "can't be created: Too many open files in system: raise the limit"),
        ("ENOMEM", "can't be created: Cannot allocate memory: free some"),
        ("EAGAIN", "can't be created: Resource temporarily unavailable: end other processes"),
        ("ENOSPC", "can't be written to"),
        ("EACCES", "can't be written to"),
    ],
)
def test_what_the_machine_lacks_is_not_called_a_full_cache(tmp_path, tokenizer, monkeypatch, number, said):
    data = toys.write_data(tmp_path / "data", "it")

    def failing(*_, **__):
        code = getattr(errno, number)
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(shards, "encode_together", failing)
    with pytest.raises(ConfigError, match=re.escape(said)) as caught:
        toys.encoded(**data, tokenizer=tokenizer, cache_dir=tmp_path / "cache")
    assert ("--cache_dir" in str(caught.value)) == (number in ("ENOSPC", "EACCES"))


def test_an_error_of_none_of_the_users_files_is_no_full_cache(tmp_path, tokenizer, monkeypatch):
    data = toys.write_data(tmp_path / "data", "it")

    def failing(*_, **__):
        raise ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET))  # of a worker that ended

    monkeypatch.setattr(shards, "encode_together", failing)
    with pytest.raises(ConnectionResetError):
        toys.encoded(**data, tokenizer=tokenizer, cache_dir=tmp_path / "cache")


def test_too_many_open_files_are_not_blamed_on_the_file(tmp_path):
    said = "a can't be read: Too many open files: raise the limit"
    with pytest.raises(DataError, match=said) as caught, read_errors(tmp_path / "a"):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    assert "look at its disk" not in str(caught.value)


@pytest.mark.parametrize("kind", ["json", "jsonl"])
def test_a_file_whose_read_fails_is_one_message(tmp_path, tokenizer, kind, monkeypatch):
    """As a disk with bad sectors: open works, and reading gives EIO from some place on."""
    data = toys.write_data(tmp_path / "data", "itti" * 400)
    if kind == "jsonl":
        records = json.loads((tmp_path / "data" / "data.json").read_text())
        data["data_path"] = str(tmp_path / "data.jsonl")
        (tmp_path / "data.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    genuine = getattr(source_module, f"read_{'json_list' if kind == 'json' else 'jsonl'}")

    def failing(path):
        for number, row in enumerate(genuine(path)):
            if number == 1_000:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            yield row

    monkeypatch.setattr(source_module, genuine.__name__, failing)
    with pytest.raises(
        DataError, match="can't be read: Input/output error: copy it again, or check its disk"
    ) as caught:
        toys.encoded(**data, tokenizer=tokenizer, cache_dir=tmp_path / "cache", num_workers=1)
    assert data["data_path"] in str(caught.value) and not isinstance(caught.value, ConfigError)
