"""Every kind of file gives the same records: streamed, with their places, embedded pictures spooled once."""

import base64
import io
import json
import os
import re
import tarfile
import tracemalloc
from pathlib import Path

import datasets
import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image
from read_data import read_samples

from llava_ds.constants import ConfigError, DataError
from llava_ds.data.sample import Message, Sample
from llava_ds.data.sources import Source, SourceOptions, open_sources, to_sample
from llava_ds.data.sources.json_files import holds_data_uri, read_json_list, read_jsonl
from llava_ds.data.sources.tars import read_members

TALK = [{"from": "human", "value": "<image>\nWhat?"}, {"from": "gpt", "value": "A cat."}]
TEXT_ONLY = [{"from": "human", "value": "Who?"}, {"from": "gpt", "value": "Me."}]


def picture(colour: str) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (4, 3), colour).save(file, "PNG")
    return file.getvalue()


RED, BLUE = picture("red"), picture("blue")


@pytest.fixture
def opened(tmp_path):
    """The source that a path is; keywords are options."""

    def open_it(path: object, **options) -> Source:
        (source,) = open_sources(str(path), SourceOptions(cache_dir=str(tmp_path / "cache"), **options))
        return source

    return open_it


def samples_of(source: Source) -> list[Sample]:
    return [to_sample(record.text, source, record.index) for record in source.read()]


def bytes_of(sample: Sample) -> list[bytes]:
    """The contents of all files, or slices, that a sample shows."""
    contents = []
    for ref in (ref for media in sample.media for ref in media.refs):
        data = Path(ref.path).read_bytes()
        contents.append(data if ref.num_bytes < 0 else data[ref.offset : ref.offset + ref.num_bytes])
    return contents


# JSON


def values() -> list:
    deep = 1
    for _ in range(3000):
        deep = [deep]
    return [
        {"a": "é" * 50, "b": [1, 2.5e3, {"c": '"]}\\'}]},
        "te\u2028xt",
        -12.25,
        True,
        None,
        [],
        {},
        deep,
        7,
        {"z": "\n"},
    ]


@pytest.mark.parametrize("window", [1, 2, 3, 7, 64, 1 << 20])
@pytest.mark.parametrize("indent", [None, 2])
def test_json_lists_come_whole_through_windows_of_any_size(tmp_path, window, indent):
    """Also a value that is nested too deeply to be parsed: it is for to_sample to refuse it."""
    path = tmp_path / "a.json"
    path.write_text(("\ufeff " + "[" + ",\r\n".join(_dump(value, indent) for value in values()) + " ]\n"), newline="")
    found = list(read_json_list(str(path), window))
    assert [text for _, text in found] == [_dump(value, indent) for value in values()]
    lines = path.read_text().split("\n")
    for line, text in found:
        assert text.split("\n")[0].rstrip("\r") in lines[line - 1]


def _dump(value: object, indent: int | None) -> str:
    try:
        return json.dumps(value, indent=indent, ensure_ascii=False)
    except RecursionError:
        return "[" * 3000 + "1" + "]" * 3000


@pytest.mark.parametrize(
    ("text", "line", "column", "what"),
    [
        ('[{"a": 1},\n {"b": 2},\n {"c" 3}]', 3, 7, "Expecting ':' delimiter"),
        ('[{"a": 1}\n {"b": 2}]', 2, 2, "found '{' where , or ] was expected"),
        ('[{"a": 1},\n\n', 3, 1, "Expecting value"),
        ('[{"a": 1},\n{"a": "x', 2, 7, "Unterminated string"),
        ('[{"a": 1}', 1, 10, "the file ends where , or ] was expected"),
        ('[{"a": 1}]\n]', 2, 1, "the list is followed by something else"),
        ('[{"a": 1},]', 1, 11, "Expecting value"),
        ('[{"a": 1}, {"a": \u20ac}]', 1, 18, "Expecting value"),
        ("[" * 5000, 1, 2, "the file ends inside a record"),
    ],
)
@pytest.mark.parametrize("window", [3, 1 << 20])
def test_where_a_list_stops_being_json_is_named(tmp_path, text, line, column, what, window):
    path = tmp_path / "a.json"
    path.write_text(text)
    good = []
    with pytest.raises(DataError) as caught:
        good.extend(read_json_list(str(path), window))
    message = str(caught.value)
    assert message.startswith(f"{path}, line {line}, column {column}: can't be read as JSON: {what}")
    assert message.endswith("nothing after it can be read")


def test_records_before_the_error_are_read(tmp_path, opened):
    path = tmp_path / "a.json"
    path.write_text(json.dumps([{"conversations": TEXT_ONLY}] * 300)[:-1] + ", {]")
    records = []
    with pytest.raises(DataError, match="line 1, column"):
        records.extend(opened(path).read())
    assert [record.index for record in records] == list(range(300))


def test_a_syntax_error_is_found_without_reading_the_rest(tmp_path):
    path = tmp_path / "a.json"
    path.write_text('[{"a": 1 "b"},' + '{"a": "' + "x" * 5_000_000 + '"}]')
    tracemalloc.start()
    with pytest.raises(DataError, match="line 1, column 10"):
        list(read_json_list(str(path), 1 << 16))
    assert tracemalloc.get_traced_memory()[1] < 2_000_000
    tracemalloc.stop()


@pytest.mark.parametrize("suffix", ["json", "jsonl"])
def test_reading_holds_a_window_and_no_file(tmp_path, suffix):
    path = tmp_path / f"a.{suffix}"
    with open(path, "w") as file:
        file.write("[" if suffix == "json" else "")
        for i in range(20_000):
            end = ",\n" if suffix == "json" and i < 19_999 else "\n"
            file.write(json.dumps({"id": i, "conversations": TEXT_ONLY, "more": "x" * 300}) + end)
        file.write("]" if suffix == "json" else "")
    assert path.stat().st_size > 8_000_000
    read = read_json_list(str(path), 1 << 16) if suffix == "json" else read_jsonl(str(path))
    tracemalloc.start()
    assert sum(1 for _ in read) == 20_000
    assert tracemalloc.get_traced_memory()[1] < 1_500_000
    tracemalloc.stop()


def test_a_record_without_end_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("llava_ds.data.sources.json_files.MAX_RECORD_CHARS", 1 << 20)
    for name, read, text in (
        ("a.json", read_json_list, '["' + "x" * (3 << 20)),
        ("a.jsonl", read_jsonl, "x" * (3 << 20)),
    ):
        (tmp_path / name).write_text(text)
        with pytest.raises(DataError, match=r"line 1.* is longer than 1 million"):
            list(read(str(tmp_path / name)))


def test_jsonl_lines_stand_for_themselves(tmp_path, opened):
    """Empty lines are no records; a line that can't be parsed is one, and rejected alone."""
    path = tmp_path / "a.jsonl"
    good = json.dumps({"conversations": TEXT_ONLY})
    path.write_bytes(b"\xef\xbb\xbf" + f'{good}\r\n\n  \n{{"x": \n'.encode() + b'{"id": "\xff"}\n' + good.encode())
    source = opened(path)
    records = list(source.read())
    assert [(record.line, record.index) for record in records] == [(1, 0), (4, 1), (5, 2), (6, 3)]
    assert {record.file for record in records} == {str(path)} and records[0].text == good
    outcomes = []
    for record in records:
        try:
            outcomes.append(to_sample(record.text, source, record.index).id)
        except DataError as error:
            outcomes.append(str(error)[:20])
    assert outcomes == ["0", "can't be read as JSO", "has no list under 'c", "3"]


def test_a_json_file_of_lines_is_jsonl(tmp_path, opened):
    path = tmp_path / "a.json"
    path.write_text(f"{json.dumps({'conversations': TEXT_ONLY})}\n" * 3)
    assert opened(path).kind == "jsonl" and len(samples_of(opened(path))) == 3
    listed = tmp_path / "b.jsonl"
    listed.write_text(json.dumps([{"conversations": TEXT_ONLY}]))
    assert opened(listed).kind == "json"


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"{", "can't be read as JSON"),
        (b"\xff\xfe\x00", "it is UTF-16, save it as UTF-8"),
        (b"hello", "can't be read as JSON: it begins with b'hello'"),
        (b"\x1f\x8b\x08", "is compressed: unpack it"),
        (b"\x28\xb5\x2f\xfdx", "is compressed: unpack it"),
        (b"PK\x03\x04", "is compressed: unpack it"),
        (b" \n", "is empty"),
        (b"[]", "holds no records"),
        (b'{"data": []}', "holds one object, expected a JSON list of records like"),
    ],
)
def test_what_holds_no_records_is_refused(tmp_path, content, expected):
    path = tmp_path / "data.json"
    path.write_bytes(content)
    with pytest.raises(DataError, match=re.escape(expected)) as caught:
        read_samples(path, None)
    assert str(caught.value).startswith(str(path))


# Pictures inside the records


def table(**changes) -> pyarrow.Table:
    rows = [
        {"id": i, "image": {"bytes": data, "path": "x.png"}, "conversations": TALK, "score": 1.5}
        for i, data in enumerate([RED, BLUE, RED])
    ]
    rows.append({"id": 3, "image": None, "conversations": TEXT_ONLY, "score": None})
    return pyarrow.Table.from_pylist([{**row, **changes} for row in rows])


def check_embedded(source: Source, cache: Path) -> None:
    samples = samples_of(source)
    assert [bytes_of(sample) for sample in samples] == [[RED], [BLUE], [RED], []]
    assert samples[0].messages == (Message("human", "<image>\nWhat?"), Message("gpt", "A cat."))
    assert [sample.id for sample in samples] == ["0", "1", "2", "3"]
    (folder,) = (cache / "pictures").iterdir()
    assert sorted(path.name for path in folder.iterdir()) == ["pictures.bin", "records.jsonl"]
    assert (folder / "pictures.bin").stat().st_size == len(RED + BLUE + RED)
    before = (folder / "pictures.bin").stat().st_mtime_ns
    assert [record.text for record in source.read()] == [record.text for record in source.read()]
    assert (folder / "pictures.bin").stat().st_mtime_ns == before
    assert all(len(record.text) < 400 for record in source.read())


def test_parquet_with_embedded_images(tmp_path, opened):
    (tmp_path / "data").mkdir()
    whole = table()
    for number, part in enumerate((whole.slice(0, 3), whole.slice(3))):
        pyarrow.parquet.write_table(part, tmp_path / "data" / f"train-{number}.parquet")
    for path in (tmp_path / "data", tmp_path / "data" / "train-*.parquet"):
        source = opened(path)
        assert source.kind == "parquet" and "LLaVA records in parquet of 2 files" in source.describe()
        check_embedded(source, tmp_path / "cache")
    places = [(Path(record.file).name, record.line, record.index) for record in source.read()]
    assert places == [
        ("train-0.parquet", 1, 0),
        ("train-0.parquet", 2, 1),
        ("train-0.parquet", 3, 2),
        ("train-1.parquet", 1, 3),
    ]
    assert source.count() == 4


def test_parquet_in_other_shapes(tmp_path, opened):
    chat = [
        {"role": "user", "content": [{"type": "image", "text": None}, {"type": "text", "text": "What?"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "A cat."}]},
    ]
    rows = [{"images": [{"bytes": RED, "path": None}], "messages": chat}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "chat.parquet")
    (sample,) = samples_of(opened(tmp_path / "chat.parquet"))
    assert bytes_of(sample) == [RED] and sample.messages[0].text == "<image>What?"
    rows = [{"image": [RED, BLUE], "caption": "Two."}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "raw.parquet")
    (sample,) = samples_of(opened(tmp_path / "raw.parquet"))
    assert bytes_of(sample) == [RED, BLUE] and sample.messages[1].text == "Two."


def test_a_table_can_not_bring_a_reference_of_its_own(tmp_path, opened):
    """Its own embedded picture is there, but a struct that looks like a reference is not one."""
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(table(), path)
    source = opened(path)
    list(source.read())
    forged = {"llava_ds_file": min(source.slices_of), "offset": 1, "num_bytes": 5}
    pyarrow.parquet.write_table(table(image=forged), path)
    for record in opened(path).read():
        with pytest.raises(DataError, match=r"expected a path|its text has 0"):
            to_sample(record.text, opened(path), 0)


@pytest.mark.parametrize(
    "change",
    [
        {"offset": -1},
        {"offset": 10**9},
        {"offset": "0"},
        {"offset": True},
        {"num_bytes": 10**9},
        {"num_bytes": -1},
        {"num_bytes": 0},
        {"num_bytes": 1e3},
        {"llava_ds_file": "/etc/hostname"},
        {"llava_ds_file": ["x"]},
    ],
)
def test_a_reference_stays_inside_the_spool(tmp_path, opened, change):
    pyarrow.parquet.write_table(table(), tmp_path / "a.parquet")
    source = opened(tmp_path / "a.parquet")
    text = json.loads(next(source.read()).text)
    to_sample(json.dumps(text), source, 0)
    text["image"].update(change)
    with pytest.raises(DataError, match=r"as its image, expected a path|image without bytes"):
        to_sample(json.dumps(text), source, 0)


def test_paths_in_tables_are_checked_like_all_paths(tmp_path, opened):
    (tmp_path / "images").mkdir()
    (tmp_path / "secret.png").write_bytes(RED)
    pyarrow.parquet.write_table(table(image={"bytes": None, "path": "../secret.png"}), tmp_path / "a.parquet")
    source = opened(tmp_path / "a.parquet", image_folder=str(tmp_path / "images"))
    with pytest.raises(DataError, match=r"'\.\./secret.png', outside"):
        to_sample(next(source.read()).text, source, 0)


def test_a_changed_table_is_spooled_anew(tmp_path, opened):
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(table().slice(0, 1), path)
    assert [bytes_of(sample) for sample in samples_of(opened(path))] == [[RED]]
    pyarrow.parquet.write_table(table().slice(1, 1), path)
    assert [bytes_of(sample) for sample in samples_of(opened(path))] == [[BLUE]]


def test_a_damaged_table_is_refused_and_leaves_no_spool(tmp_path, opened):
    path = tmp_path / "a.parquet"
    path.write_bytes(b"PAR1 nonsense")
    with pytest.raises(DataError, match="can't be read as parquet"):
        opened(path)
    pyarrow.parquet.write_table(table(), path, compression="none")
    data = bytearray(path.read_bytes())
    source = opened(path)
    data[4:200] = b"\xff" * 196
    path.write_bytes(data)
    with pytest.raises(DataError, match="can't be read after row 0"):
        list(source.read())
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.name != "pictures"]


def test_a_saved_datasets_folder(tmp_path, opened):
    features = datasets.Features(
        {
            "id": datasets.Value("int64"),
            "image": datasets.Image(),
            "conversations": [{"from": datasets.Value("string"), "value": datasets.Value("string")}],
        }
    )
    rows = table().select(["id", "image", "conversations"]).to_pylist()
    saved = datasets.Dataset.from_list(rows, features=features)
    saved.select([3, 0, 1, 2]).select([1, 2, 3, 0]).save_to_disk(tmp_path / "one")
    source = opened(tmp_path / "one")
    assert source.kind == "datasets" and all(Path(path).is_file() for path in source.files)
    check_embedded(source, tmp_path / "cache")
    assert {record.file for record in source.read()} == {str(tmp_path / "one")} and source.count() == 4

    datasets.DatasetDict(train=saved, test=saved.select([1])).save_to_disk(tmp_path / "splits")
    with pytest.raises(ConfigError, match=r"holds the splits 'train' and 'test': choose one with --data_split train"):
        opened(tmp_path / "splits")
    with pytest.raises(ConfigError, match="has no split 'dev': its splits are 'train', 'test'"):
        opened(tmp_path / "splits", split="dev")
    assert opened(tmp_path / "splits", split="train").count() == 4
    assert "; the split 'train', and not 'test'" in opened(tmp_path / "splits", split="train").describe()
    assert "the split" not in opened(tmp_path / "splits" / "test").describe()
    assert opened(tmp_path / "splits" / "test").count() == 1
    datasets.DatasetDict(dev=saved).save_to_disk(tmp_path / "untrained")
    assert (
        opened(tmp_path / "untrained").count() == 4 and "the split 'dev'" in opened(tmp_path / "untrained").describe()
    )
    (tmp_path / "one" / "state.json").write_text("{}")
    with pytest.raises(DataError, match="can't be opened as a saved datasets folder"):
        opened(tmp_path / "one")


def test_data_uris_are_spooled(tmp_path, opened):
    def record(url: str) -> dict:
        part = {"type": "image_url", "image_url": {"url": url}}
        question = {"role": "user", "content": [part, {"type": "text", "text": "What?"}]}
        return {"messages": [question, {"role": "assistant", "content": 'see "data:image/png;base64,xyz"'}]}

    uri = "data:image/png;base64," + base64.b64encode(RED).decode()
    forged = {"messages": [{"role": "user", "content": [{"type": "image", "image": {}}]}]}
    path = tmp_path / "a.jsonl"
    lines = [record(uri), record(uri[:-5] + "*"), "{broken", record("../a.png"), forged]
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    source = opened(path, image_folder=str(tmp_path))
    forged["messages"][0]["content"][0]["image"] = {"llava_ds_file": min(source.slices_of), "offset": 0, "num_bytes": 9}
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    source = opened(path, image_folder=str(tmp_path))
    records = list(source.read())
    sample = to_sample(records[0].text, source, 0)
    assert bytes_of(sample) == [RED] and sample.messages[0].text == "<image>What?"
    assert sample.messages[1].text == 'see "data:image/png;base64,xyz"'
    reasons = []
    for number in (1, 2, 3, 4):
        assert records[number].line == number + 1
        with pytest.raises(DataError) as caught:
            to_sample(records[number].text, source, number)
        reasons.append(str(caught.value))
    assert "as its image, expected a path" in reasons[0] and "can't be read as JSON" in reasons[1]
    assert "outside the image folder" in reasons[2] and "names 0 images" in reasons[3]


@pytest.mark.parametrize(
    ("text", "found"),
    [('{"a": "data:image/png"}', True), (r'{"a": "\"data:image/png\""}', False), ('"data:image', True), ("{}", False)],
)
def test_data_uris_are_found_wherever_a_window_ends(tmp_path, monkeypatch, text, found):
    (tmp_path / "a").write_text(text)
    for window in range(1, len(text) + 1):
        monkeypatch.setattr("llava_ds.data.sources.json_files.WINDOW_BYTES", window)
        assert holds_data_uri(str(tmp_path / "a")) == found


def test_a_spool_that_can_not_be_written_is_named(tmp_path, opened):
    pyarrow.parquet.write_table(table(), tmp_path / "a.parquet")
    (tmp_path / "cache").write_text("no folder")
    with pytest.raises(ConfigError, match="images inside the data can't be written to"):
        list(opened(tmp_path / "a.parquet").read())


# Folders of pictures


@pytest.mark.parametrize("suffix", ["jsonl", "csv", "parquet"])
@pytest.mark.parametrize("inner", ["", "train"])
def test_a_folder_of_images_with_captions(tmp_path, opened, suffix, inner):
    folder = tmp_path / "pictures" / inner
    (folder / "sub").mkdir(parents=True)
    (folder / "a.png").write_bytes(RED)
    (folder / "sub" / "b.png").write_bytes(BLUE)
    rows = [{"file_name": "a.png", "text": 'A "red", one.'}, {"file_name": "sub/b.png", "text": "A blue one."}]
    rows.append({"file_name": "../../out.png", "text": "Outside."})
    path = folder / f"metadata.{suffix}"
    if suffix == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif suffix == "csv":
        path.write_text('file_name,text\na.png,"A ""red"", one."\nsub/b.png,A blue one.\n../../out.png,Outside.\n')
    else:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    source = opened(tmp_path / "pictures", image_folder=str(tmp_path))
    assert source.kind == "imagefolder" and source.format == "caption" and source.image_root == str(folder).rstrip("/")
    assert "image from 'file_name', text from 'text'" in source.describe()
    *good, bad = source.read()
    samples = [to_sample(record.text, source, record.index) for record in good]
    assert [bytes_of(sample) for sample in samples] == [[RED], [BLUE]]
    assert samples[0].messages == (Message("human", "<image>"), Message("gpt", 'A "red", one.'))
    with pytest.raises(DataError, match=r"out\.png', outside the image folder"):
        to_sample(bad.text, source, 2)


def test_metadata_may_hold_several_images_and_conversations(tmp_path, opened):
    for name, data in (("a.png", RED), ("b.png", BLUE)):
        (tmp_path / name).write_bytes(data)
    talk = [{"from": "human", "value": "<image> or <image>?"}, {"from": "gpt", "value": "Both."}]
    path = tmp_path / "metadata.jsonl"
    path.write_text(json.dumps({"file_names": ["a.png", "b.png"], "conversations": talk}) + "\n")
    (sample,) = samples_of(opened(tmp_path))
    assert bytes_of(sample) == [RED, BLUE]
    path.write_text(json.dumps({"image_file_name": "a.png", "prompt": "A red one."}) + "\n")
    (sample,) = samples_of(opened(tmp_path, columns=(("text", "prompt"),)))
    assert bytes_of(sample) == [RED]


# WebDataset


def pack(path: Path, members: list[tuple[str, bytes]], tar_format: int = tarfile.GNU_FORMAT) -> Path:
    with tarfile.open(path, "w", format=tar_format) as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def test_members_of_shards_that_are_not_read_are_named(tmp_path, opened):
    members = [("a.jpg", b"an image"), ("a.json", json.dumps({"text": "A cat.", "url": "x"}).encode()), ("a.npy", b"x")]
    source = opened(pack(tmp_path / "s.tar", members))
    [sample] = [to_sample(record.text, source, record.index) for record in source.read()]
    assert sample.unread == ("url", ".npy")


@pytest.mark.parametrize("tar_format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_shards_are_read_in_place(tmp_path, opened, tar_format):
    long = "folder/" * 20 + ("x" * 60 if tar_format == tarfile.USTAR_FORMAT else "é" * 90)
    record = {"id": "mine", "image": "0.png", "conversations": TALK}
    two = {"conversations": [{"from": "human", "value": "<image> <image>"}, TALK[1]]}
    pack(
        tmp_path / "s-000.tar",
        [
            ("a/0.png", RED),
            ("a/0.json", json.dumps(record).encode()),
            (f"{long}.PNG", BLUE),
            (f"{long}.json", json.dumps({"image": "coco/7.png", "conversations": TALK}).encode()),
            ("._junk", b"x"),
        ],
        tar_format,
    )
    with open(tmp_path / "s-000.tar", "rb") as file, tarfile.open(tmp_path / "s-000.tar") as tar:
        members = [(member.name, member.offset, member.num_bytes) for member in read_members(file, "s-000.tar")]
        assert members == [(info.name, info.offset_data, info.size) for info in tar]
    text_only = json.dumps({"conversations": TEXT_ONLY}).encode()
    members = [("2.json", json.dumps(two).encode()), ("2.0.png", RED), ("2.1.png", BLUE), ("3.json", text_only)]
    pack(tmp_path / "s-001.tar", members, tar_format)
    for path in (tmp_path, tmp_path / "s-*.tar", tmp_path / "s-{000..001}.tar", tmp_path / "s-{000,001}.tar"):
        source = opened(path)
        assert source.kind == "webdataset" and "WebDataset shards of 2 files" in source.describe()
        samples = samples_of(source)
        assert [bytes_of(sample) for sample in samples] == [[RED], [BLUE], [RED, BLUE], []]
        assert [sample.id for sample in samples] == ["mine", long, "2", "3"]
    assert [(Path(r.file).name, r.line) for r in source.read()][:3] == [
        ("s-000.tar", 1),
        ("s-000.tar", 3),
        ("s-001.tar", 1),
    ]
    assert not (tmp_path / "cache").exists()


def test_shards_of_captions_and_their_bad_records(tmp_path, opened):
    forged = {"image": {"llava_ds_file": str(tmp_path / "s.tar"), "offset": 0, "num_bytes": 9}, "text": "x"}
    members = [
        ("0.png", RED),
        ("0.txt", b"A red one.\n"),
        ("0.json", b'{"caption": "A red one.", "url": "https://x.org"}'),
        ("1.txt", b"No picture."),
        ("2.png", BLUE),
        ("2.txt", b"\xff\xfe"),
        ("3.json", b"[1"),
        ("4.json", b"[1]"),
        ("5.txt", b"a"),
        ("5.2.txt", b"b"),
        ("6.json", json.dumps(forged).encode()),
        ("7.json", b'{"text": "x", "image": "../secret.png"}'),
        ("8.json", b"[" * 100_000),
    ]
    source = opened(pack(tmp_path / "s.tar", members))
    assert source.format == "caption"
    first, *rest = source.read()
    sample = to_sample(first.text, source, 0)
    assert sample.messages[1].text == "A red one." and bytes_of(sample) == [RED]
    reasons = []
    for record in rest:
        with pytest.raises(DataError) as caught:
            to_sample(record.text, source, record.index)
        reasons.append(str(caught.value))
    for reason, expected in zip(
        reasons,
        [
            "has no image under",
            "its .json or .txt can't be read",
            "its .json or .txt can't be read",
            "its .json is a list, expected an object",
            "the key '5' has several .json or .txt members",
            "as its image, expected a path",
            "names the image '../secret.png': give --image_folder",
            "its .json is nested too deeply",
        ],
        strict=True,
    ):
        assert expected in reason


def test_damaged_shards_are_refused_with_the_place(tmp_path, opened):
    path = pack(tmp_path / "s.tar", [("0.png", RED), ("0.txt", b"A red one."), ("1.png", BLUE), ("1.txt", b"Blue.")])
    whole = path.read_bytes()
    opened(path)
    second = whole.index(b"1.png")
    for data, expected in (
        (whole[: second + 520], f"the tar ends at byte {second + 520}, inside the member at byte {second}"),
        (whole[:second], f"the tar ends at byte {second} without its end mark: it is not whole"),
        (whole[:second] + b"\xff" * 2000, f"no tar header at byte {second}"),
        (whole[: second + 2] + b"x" + whole[second + 3 :], f"at byte {second}: its checksum is wrong"),
        (b"\x1f\x8b" + whole, "is compressed: unpack it to a plain .tar"),
        (b"", "without its end mark"),
    ):
        path.write_bytes(data)
        with pytest.raises(DataError, match=re.escape(expected)):
            list(opened(path).read())


def test_links_in_shards_lead_nowhere(tmp_path, opened):
    with tarfile.open(tmp_path / "s.tar", "w") as tar:
        for name, kind in (("0.png", tarfile.SYMTYPE), ("1.png", tarfile.LNKTYPE), ("2.png", tarfile.REGTYPE)):
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, "/etc/hostname"
            info.size = len(RED) if kind == tarfile.REGTYPE else 0
            tar.addfile(info, io.BytesIO(RED))
            text = tarfile.TarInfo(name.replace("png", "txt"))
            text.size = 1
            tar.addfile(text, io.BytesIO(b"x"))
    source = opened(tmp_path / "s.tar")
    one, two, three = source.read()
    for record in (one, two):
        with pytest.raises(DataError, match="has no image"):
            to_sample(record.text, source, 0)
    assert bytes_of(to_sample(three.text, source, 0)) == [RED]


def test_a_list_among_records_with_embedded_images_is_a_record(opened, tmp_path):
    """It may stand on several lines, but a spool has a line per record."""
    path = tmp_path / "a.json"
    path.write_text(f'[{json.dumps({"image": "data:image/png;base64,AAAA", "conversations": TALK})},\n[1,\n2], "x"]')
    source = opened(path)
    assert [json.loads(record.text) for record in source.read()][1:] == [[1, 2], "x"]
    assert [record.line for record in source.read()] == [1, 2, 3]


def test_a_saved_folder_with_offsets_that_lead_outside_is_refused(opened, tmp_path):
    rows = [{"conversations": TEXT_ONLY, "id": f"number {i}"} for i in range(50)]
    datasets.Dataset.from_list(rows).save_to_disk(str(tmp_path / "saved"))
    [path] = (tmp_path / "saved").glob("*.arrow")
    data = bytearray(path.read_bytes())
    offsets = b"".join(i.to_bytes(4, "little") for i in (0, 8, 16, 24))  # of the ids
    at = data.index(offsets)
    data[at + 4 : at + 8] = b"\xff\xff\xff\x7f"
    path.write_bytes(data)
    with pytest.raises(DataError, match="can't be read after row 0"):
        list(opened(tmp_path / "saved").read())


def test_pipes_and_folders_named_like_shards_are_no_shards(opened, tmp_path):
    os.mkfifo(tmp_path / "a.tar")
    (tmp_path / "b.parquet").mkdir()
    with pytest.raises(ConfigError, match="has nothing to read"):
        opened(tmp_path)


def test_jsonl_may_begin_with_a_bad_record_and_a_list_with_empty_lines(opened, tmp_path):
    lines, rows = tmp_path / "a.jsonl", tmp_path / "b.json"
    lines.write_text("[1]\n" + json.dumps({"conversations": TEXT_ONLY}) + "\n")
    assert [record.line for record in opened(lines).read()] == [1, 2]
    for path in (rows, tmp_path / "c.jsonl"):
        path.write_text("\n" * 600 + json.dumps([{"conversations": TEXT_ONLY}]) + "\n")
        assert [record.line for record in opened(path).read()] == [601]
