"""Data sets meant to break something: every record is trained on or listed with a reason, or all is refused at once.

HOSTILE_DATA_SETS says how many are tried, HOSTILE_SEED the first one's seed. Each is opened and read in a process of
its own, with a bound of memory and of time.
"""

import io
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import tarfile
import traceback
from collections import Counter
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet
import pytest
import toys
from PIL import Image

from llava_ds.constants import ConfigError, DataError
from llava_ds.data.collate import collate
from llava_ds.data.dataset import BrokenSample, PreflightOptions, open_encoded
from llava_ds.data.sources import SourceOptions, open_sources, parse_columns

COUNT = int(os.environ.get("HOSTILE_DATA_SETS", "500"))
SEED = int(os.environ.get("HOSTILE_SEED", "0"))
LIMIT_S, LIMIT_BYTES = 60, 3 << 30
FORMATS = ("json", "jsonl", "parquet", "saved", "folder", "tar", "mixture")
NAMES = [
    "good.png", "jpeg.jpg", "cut.png", "empty.png", "bomb.png", "deep.png", "palette.png", "moves.gif", "cmyk.jpg",
    "text.png", "folder.png", "pipe.png", "gone.png", "nowhere/../good.png", "../outside.png", "/etc/passwd",
    "http://a/b.png", "data:image/png;base64,AAAA", "", ".", "a\0b.png", "\udcff.png", "\ud800", "x" * 5000,
    "line\nbreak.png", "thin.png",
]  # fmt: skip
JUNK = [
    None, True, 0, -1, 10**30, 1.5, float("nan"), "", " ", "\0", "\ud83d", "\ufdd0", "\ufdd2image\ufdd3", "<image>",
    "<image>" * 30, "<video>", "</s><|im_end|>", "🦙" * 60, [], {}, [[]], [None], {"path": "good.png"}, {"bytes": "x"},
    {"llava_ds_file": "/etc/passwd", "offset": 0, "num_bytes": 5}, {"llava_ds_rejected": "x"}, {"from": "human"},
    "\u202e\x1b[2J", "a" * 300_000, " " * 300_000, "猫" * 200_000, "word " * 100_000,
]  # fmt: skip


def write_images(folder: Path) -> None:
    rng = random.Random(1)
    noise = Image.frombytes("RGB", (50, 40), rng.randbytes(6000))
    noise.save(folder / "good.png")
    noise.save(folder / "jpeg.jpg")
    (folder / "cut.png").write_bytes((folder / "good.png").read_bytes()[:900])
    (folder / "empty.png").write_bytes(b"")
    Image.new("1", (12_000, 12_000)).save(folder / "bomb.png")
    Image.fromarray(__import__("numpy").full((30, 30), 40_000, "uint16")).save(folder / "deep.png")
    noise.convert("P").save(folder / "palette.png", transparency=3)
    noise.save(folder / "moves.gif", save_all=True, append_images=[noise.rotate(90)])
    noise.convert("CMYK").save(folder / "cmyk.jpg")
    (folder / "text.png").write_text("no picture")
    (folder / "folder.png").mkdir()
    os.mkfifo(folder / "pipe.png")
    Image.new("RGB", (1, 30_000)).save(folder / "thin.png")
    (folder / os.fsdecode(b"\xff.png")).write_bytes((folder / "good.png").read_bytes())
    (folder / "line\nbreak.png").write_bytes((folder / "good.png").read_bytes())


def good_record(rng: random.Random) -> dict:
    if rng.random() < 0.3:
        turns = [("user", "Hello"), ("assistant", "Hi there.")]
        return {"messages": [{"role": role, "content": text} for role, text in turns]}
    turns = [("human", "<image>\nWhat?"), ("gpt", "Noise."), ("human", "Sure?"), ("gpt", "Yes.")]
    return {
        "id": str(rng.randrange(10**6)),
        "image": "good.png",
        "conversations": [{"from": role, "value": text} for role, text in turns[: rng.choice([2, 4])]],
    }


def hostile_record(rng: random.Random) -> object:
    """A record with some of its places replaced, dropped, nested or filled."""
    record: dict = good_record(rng)
    if "image" in record and rng.random() < 0.6:
        record["image"] = rng.choice(NAMES)
    for _ in range(rng.choice([0, 1, 1, 2, 4])):
        holders: list = [record]
        for holder in holders:
            inner = holder.values() if isinstance(holder, dict) else holder
            holders += [each for each in inner if isinstance(each, (dict, list)) and each]
        holder = rng.choice(holders)
        if not holder:
            break
        key = rng.choice(list(holder) if isinstance(holder, dict) else range(len(holder)))
        action = rng.randrange(5)
        if action < 2:
            holder[key] = rng.choice(JUNK)
        elif action == 2:
            del holder[key]
        elif action == 3 and isinstance(holder, dict):
            holder[rng.choice(["images", "video", "messages", "system", "kind", "text", "\udcff"])] = holder[key]
        else:
            nested: object = holder[key]
            for _ in range(rng.choice([1, 5, 900, 5000])):
                nested = [nested]
            holder[key] = nested
    return record if rng.random() < 0.95 else rng.choice(JUNK)


def as_json(record: object, rng: random.Random) -> str:
    try:
        text = json.dumps(record, ensure_ascii=rng.random() < 0.8)
    except RecursionError:
        text = '{"a":' * 3000 + "1" + "}" * 3000
    if rng.random() < 0.06:
        at = rng.randrange(len(text))
        text = text[:at] + rng.choice(["", "\0", "[" * 4000, "\\ud800", "NaN", '"', "9" * 6000]) + text[at + 1 :]
    return text


def written(folder: Path, kind: str, rng: random.Random) -> tuple[str, int | None]:
    """A data set of a kind in a folder: its path, and its records where their number can be told."""
    records = [hostile_record(rng) if rng.random() < 0.4 else good_record(rng) for _ in range(rng.randint(2, 7))]
    if kind in ("json", "jsonl"):
        texts = [as_json(record, rng).replace("\n", " ") for record in records]
        path = folder / f"data.{kind}"
        text = f"[{', '.join(texts)}]" if kind == "json" else "".join(f"{text}\n" for text in texts)
        data = text.encode("utf-8", "surrogatepass")
        if rng.random() < 0.1:
            data = data[: rng.randrange(len(data) + 1)]
            return _put(path, data), None
        if rng.random() < 0.1:
            at = rng.randrange(len(data))
            data = data[:at] + rng.randbytes(3) + data[at + 3 :]
            return _put(path, data), None
        return _put(path, data), len(records) if kind == "jsonl" else None
    if kind in ("parquet", "saved"):
        return _table(folder, kind, rng)
    if kind == "folder":
        lines = [{"file_name": rng.choice(NAMES), "text": rng.choice(["A cat.", *JUNK])} for _ in records]
        if rng.random() < 0.2:
            lines = [{"text": "nothing named"}]
        _put(folder / "metadata.jsonl", "".join(f"{as_json(line, rng)}\n" for line in lines).encode("utf-8", "replace"))
        return str(folder), len(lines)
    if kind == "tar":
        return _shard(folder, rng), None
    parts = [written(_made(folder / str(i)), rng.choice(["json", "jsonl", "parquet"]), rng)[0] for i in range(2)]
    entries: list[object] = [
        {"path": part, "image_folder": str(folder), "weight": rng.choice([1, 0.5, 2])} for part in parts
    ]
    if rng.random() < 0.4:
        entries.append(rng.choice([*JUNK, {"path": "gone.json"}, {"path": parts[0], "weight": -1}, {"pat": 1}]))
    return _put(folder / "mixture.yaml", json.dumps({"datasets": entries}).encode()), None


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def _put(path: Path, data: bytes) -> str:
    path.write_bytes(data)
    return str(path)


def _table(folder: Path, kind: str, rng: random.Random) -> tuple[str, int]:
    questions = [rng.choice(["<image>\nWhat?", "Hello", "\0", ""]) for _ in range(rng.randint(1, 5))]
    turns = [[{"from": "human", "value": text}, {"from": "gpt", "value": "So."}] for text in questions]
    image = io.BytesIO()
    Image.new("RGB", (9, 9)).save(image, "PNG")
    whole = image.getvalue()
    pictures = [
        {"bytes": rng.choice([whole, whole[:40], b"", None]), "path": rng.choice([None, "good.png"])} for _ in turns
    ]
    columns = {
        "id": rng.choice([[str(i) for i in range(len(turns))], [1.5] * len(turns), ["i" * 2_000_000] * len(turns)]),
        "image": rng.choice([pictures, ["good.png"] * len(turns), [7] * len(turns), [b"\xff"] * len(turns)]),
        "conversations": rng.choice([turns, turns, turns, ["text"] * len(turns), [None] * len(turns)]),
    }
    if rng.random() < 0.3:
        del columns[rng.choice(list(columns))]
    table = pa.table(columns)
    if kind == "saved":
        saved = datasets.Dataset(table)
        saved = datasets.DatasetDict({rng.choice(["train", "test"]): saved}) if rng.random() < 0.4 else saved
        saved.save_to_disk(folder / "saved")
        if rng.random() < 0.3:
            file = rng.choice([path for path in (folder / "saved").rglob("*") if path.is_file()])
            file.write_bytes(file.read_bytes()[: rng.randrange(file.stat().st_size + 1)])
        return str(folder / "saved"), len(turns)
    pa.parquet.write_table(table, folder / "data.parquet")
    if rng.random() < 0.2:
        data = bytearray((folder / "data.parquet").read_bytes())
        for _ in range(5):
            data[rng.randrange(len(data))] = rng.randrange(256)
        _put(folder / "data.parquet", bytes(data))
    return str(folder / "data.parquet"), len(turns)


def _shard(folder: Path, rng: random.Random) -> str:
    path, picture = folder / "a.tar", (folder / "good.png").read_bytes()
    with tarfile.open(path, "w", format=rng.choice([tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])) as tar:
        for i in range(rng.randint(1, 5)):
            key = rng.choice([f"{i}", f"d/{i}", os.fsdecode(b"\xff%d" % i), "../up", "x" * 300, "same"])
            text = rng.choice([b"A cat.", b"\xff", b"", b"<image>", b"c" * 200_000])
            for name, data in ((f"{key}.png", rng.choice([picture, picture[:99], b""])), (f"{key}.txt", text)):
                info = tarfile.TarInfo(name)
                info.size = len(data)
                info.type = rng.choice([tarfile.REGTYPE] * 9 + [tarfile.SYMTYPE])
                tar.addfile(info, io.BytesIO(data))
    if rng.random() < 0.2:
        data = path.read_bytes()
        path.write_bytes(data[: rng.randrange(len(data) + 1)])
    return str(path)


def outcome(folder: Path, seed: int, tokenizer) -> str:
    """What becomes of one data set: "trained …", "refused …", or a traceback."""
    rng = random.Random(seed)
    kind = FORMATS[seed % len(FORMATS)]
    path, expected = written(folder, kind, rng)
    where = folder if kind != "tar" else None
    skip = rng.random() < 0.7
    try:
        sources = open_sources(
            path,
            SourceOptions(
                image_folder=where and str(where),
                columns=parse_columns(None),
                cache_dir=str(folder / "cache"),
                on_unmarked_image=rng.choice(["refuse", "prepend", "text"]),
            ),
        )
        encoding = toys.encoding_options(max_length=rng.choice([60, 2048]), split_special_tokens=rng.random() < 0.5)
        image_options = toys.image_options(aspect_ratio=rng.choice(["square", "pad", "anyres"]))
        preflight = PreflightOptions(str(folder / "cache"), 1, "skip" if skip else "stop", 1.0 if skip else 0.0)
        data = open_encoded(sources, tokenizer, encoding, image_options, preflight)
    except (ConfigError, DataError) as error:
        assert str(error).strip() and len(str(error)) < 60_000, "a message that nobody reads"
        str(error).encode("utf-8", "backslashreplace")
        return f"refused {kind}: {error}"
    rejected = list(data.rejections())
    assert len(data) + len(rejected) == data.num_records, "the numbers don't add up"
    assert expected in (None, data.num_records), f"{data.num_records} of {expected} records"
    for row in rejected:
        assert row["reason"].strip() and len(json.dumps(row)) < 20_000, row
    "\n".join(data.summary())
    broken = 0
    for i in range(len(data)):
        sample = data[i]
        broken += isinstance(sample, BrokenSample)
        if isinstance(sample, BrokenSample):
            assert sample.reason
        else:
            batch = collate([sample], data.image_options)
            assert len(batch.targets) > 0, "nothing to learn from"
    return f"trained {kind}: {len(data) - broken} {len(rejected)} {broken}"


def in_child(folder: Path, seed: int, tokenizer) -> str:
    """The outcome in a process of its own; "hangs" or "dies" where it has none."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(LIMIT_S)
        resource.setrlimit(resource.RLIMIT_DATA, (LIMIT_BYTES, LIMIT_BYTES))
        os.close(reading)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        try:
            told = outcome(folder, seed, tokenizer)
        except BaseException:
            told = "traceback " + traceback.format_exc(limit=-6)
        with os.fdopen(writing, "w", encoding="utf-8", errors="backslashreplace") as pipe:
            pipe.write(told)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, encoding="utf-8") as pipe:
        told = pipe.read()
    _, status = os.waitpid(child, 0)
    if told:
        return told
    return f"hangs {seed}" if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGALRM else f"dies {status}"


@pytest.mark.long
def test_hostile_data_sets_are_trained_on_or_refused(tmp_path, tokenizer, capsys):
    counts, numbers, wrong = Counter(), Counter(), []
    write_images(_made(tmp_path / "images"))
    for seed in range(SEED, SEED + COUNT):
        folder = _made(tmp_path / str(seed))
        subprocess.run(["cp", "-a", f"{tmp_path}/images/.", str(folder)], check=True)
        told = in_child(folder, seed, tokenizer)
        if os.environ.get("HOSTILE_SHOWN"):
            print(seed, told)
        shutil.rmtree(tmp_path / str(seed), ignore_errors=True)
        counts[" ".join(told.split(":")[0].split()[:2]) if not told.startswith("traceback") else "traceback"] += 1
        if told.startswith("trained"):
            numbers.update(dict(zip(("accepted", "rejected", "broken"), map(int, told.split(": ")[1].split()))))
        elif not told.startswith("refused"):
            wrong.append(f"seed {seed}: {told}")
    with capsys.disabled():
        print(f"\n{COUNT} data sets: {dict(sorted(counts.items()))}; records: {dict(numbers)}")
    assert not wrong, "\n".join(wrong[:10])
    assert COUNT < 100 or all(counts[f"{end} {kind}"] for end in ("trained", "refused") for kind in FORMATS)
