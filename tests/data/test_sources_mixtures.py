"""Mixtures and selections: LLaVA-NeXT's counts, the same records in every process, and every mistake named."""

import json
import math
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import pytest
import yaml
from read_data import read_samples

from llava_ds.constants import ConfigError
from llava_ds.data.sources import RawRecord, SourceOptions, open_sources, parse_columns, to_sample
from llava_ds.data.sources.locate import expand
from llava_ds.data.sources.selection import parse_selection
from llava_ds.data.sources.source import short_names

TEXT_ONLY = [{"from": "human", "value": "Who?"}, {"from": "gpt", "value": "Me."}]
TALK = [{"from": "human", "value": "<image>\nWhat?"}, {"from": "gpt", "value": "A cat."}]


def write(path: Path, name: str, num_records: int) -> str:
    path.parent.mkdir(exist_ok=True)
    records = [{"id": f"{name}{i}", "conversations": TEXT_ONLY} for i in range(num_records)]
    if path.suffix == ".json":
        path.write_text(json.dumps(records))
    else:
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def mixture(tmp_path: Path, *entries: object, **top: object) -> str:
    path = tmp_path / "mix.yaml"
    path.write_text(yaml.safe_dump({"datasets": list(entries), **top}))
    return str(path)


def options(tmp_path: Path, **values) -> SourceOptions:
    return SourceOptions(cache_dir=str(tmp_path / "cache"), **values)


def ids(sources) -> list[str]:
    return [to_sample(record.text, source, 0).id for source in sources for record in source.read()]


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        ("all", range(7)),
        ("first:3", range(3)),
        ("first:99", range(7)),
        ("end:2", [5, 6]),
        ("end:99", range(7)),
        ("first:50%", range(4)),
        ("first:1%", range(1)),
        ("end:50%", range(3, 7)),
        ("first:100%", range(7)),
        ("first:14.2%", range(1)),
        ("first:14.3%", range(2)),
    ],
)
def test_strategies_count_as_llava_next_does(strategy, expected):
    """A percentage is rounded up."""
    chosen = parse_selection(strategy)
    assert list(chosen.apply(lambda: iter(range(7)), lambda: 7)) == list(expected)


@pytest.mark.parametrize(
    ("strategy", "number"), [("random:5", 5), ("random:20%", 20), ("random:99%", 99), ("random:500", 100)]
)
def test_random_takes_so_many_in_order_and_depends_on_the_seed(strategy, number):
    def take(seed: int) -> list[int]:
        return list(parse_selection(strategy, seed=seed).apply(lambda: iter(range(100)), lambda: 100))

    taken = take(1)
    assert len(set(taken)) == number and taken == sorted(taken) == take(1)
    assert (take(2) != taken) == (number < 100)


def test_every_record_is_as_likely():
    counts = [0] * 10
    for seed in range(2000):
        for i in parse_selection("random:3", seed=seed).apply(lambda: iter(range(10)), lambda: 10):
            counts[i] += 1
    assert all(abs(count - 600) < 5 * math.sqrt(2000 * 0.3 * 0.7) for count in counts)


def test_weights_repeat_and_thin_out():
    def take(weight: float, strategy: str = "all", number: int = 9) -> list[int]:
        return list(parse_selection(strategy, weight).apply(lambda: iter(range(number)), lambda: number))

    assert take(2) == [*range(9), *range(9)]
    half = take(0.5)
    assert len(half) == 5 and half == sorted(set(half))  # rounded up
    more = take(2.5)
    assert more[:18] == take(2) and more[18:] == half
    assert len(take(0.1, number=1000)) == 100 and len(take(1.1, number=1000)) == 1100  # exact, not 0.1's binary form
    assert take(2, "end:2") == [7, 8, 7, 8]
    assert parse_selection(weight=0.1).weight == Fraction(1, 10)


def test_a_prefix_is_read_without_counting():
    endless = iter(int, 1)
    assert list(parse_selection("first:3").apply(lambda: endless, lambda: pytest.fail("counted"))) == [0, 0, 0]


def test_llava_next_yaml_is_read_as_it_stands(tmp_path):
    write(tmp_path / "a.json", "a", 10)
    write(tmp_path / "b.jsonl", "b", 10)
    write(tmp_path / "c.json", "c", 3)
    path = mixture(
        tmp_path,
        {"json_path": str(tmp_path / "a.json"), "sampling_strategy": "first:25%"},
        {"json_path": "b.jsonl", "sampling_strategy": "end:2"},
        {"json_path": "c.json"},
        {"json_path": "a.json", "sampling_strategy": "random:4"},
    )
    sources = open_sources(path, options(tmp_path))
    found = ids(sources)
    assert found[:8] == ["a0", "a1", "a2", "b8", "b9", "c0", "c1", "c2"] and len(found) == 12
    assert [source.describe().rpartition("; taken: ")[2] for source in sources[:2]] == ["the first 25%", "the last 2"]
    assert "taken" not in sources[2].describe()
    assert sources[3].describe().endswith("taken: random 4, seed 42")
    assert [r.index for r in sources[1].read()] == [8, 9] and [r.line for r in sources[1].read()] == [9, 10]


def test_our_own_form_says_more(tmp_path):
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "a.png").write_bytes(b"x")
    (tmp_path / "x.json").write_text(json.dumps([{"dialog": TALK, "image": "a.png"}] * 4))
    write(tmp_path / "t.json", "t", 4)
    entry = {
        "path": "x.json",
        "image_folder": "pictures",
        "weight": 2.5,
        "seed": 7,
        "format": "llava",
        "columns": {"conversations": "dialog"},
    }
    path = mixture(tmp_path, entry, {"path": "t.json", "columns": "id=id"})
    first, second = open_sources(path, options(tmp_path, image_folder=str(tmp_path)))
    records = list(first.read())
    assert len(records) == 10 and [record.index for record in records[:8]] == [0, 1, 2, 3] * 2
    sample = to_sample(records[0].text, first, 0)
    assert sample.media[0].refs[0].path == str(tmp_path / "pictures" / "a.png")
    assert "taken: 2.5 times over, seed 7" in first.describe()
    assert first.video_root == first.image_root and second.image_root == str(tmp_path)
    listed = tmp_path / "list.yml"
    listed.write_text(yaml.safe_dump([{"path": "t.json"}]))
    assert ids(open_sources(str(listed), options(tmp_path))) == ["t0", "t1", "t2", "t3"]


def test_another_process_takes_the_same_records(tmp_path):
    write(tmp_path / "a.json", "a", 200)
    path = mixture(tmp_path, {"path": "a.json", "sampling_strategy": "random:30%", "weight": 1.5, "seed": 3})
    here = [record.index for source in open_sources(path, options(tmp_path)) for record in source.read()]
    code = (
        "from llava_ds.data.sources import *; import sys; "
        "print([r.index for s in open_sources(sys.argv[1], SourceOptions()) for r in s.read()])"
    )
    done = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == here and len(here) == 90


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        ("a.json", "is 'a.json', expected keys and values like path: data.json"),
        (
            {"path": "a.json", "sampling_strategie": "all"},
            "unknown key 'sampling_strategie': did you mean sampling_str",
        ),
        ({"path": "a.json", 3: 4}, "unknown key 3: known are path, json_path"),
        ({"path": "a.json", "json_path": "a.json"}, "names both path and json_path"),
        ({"weight": 1}, "has no path"),
        ({"path": 3}, "path is 3, expected text"),
        ({"path": "none.json"}, "none.json: no such file or folder; expected a .json, .jsonl"),
        ({"path": "mix.yaml"}, "is a mixture itself: list its entries here"),
        ({"path": "a.json", "format": "lava"}, "unknown format 'lava': did you mean llava?"),
        ({"path": "a.json", "image_folder": "nowhere"}, "nowhere: no such folder"),
        ({"path": "a.json", "columns": "picture=x"}, "unknown field 'picture'"),
        ({"path": "a.json", "columns": ["x"]}, "columns is ['x'], expected field=column pairs"),
        ({"path": "a.json", "seed": "x"}, "seed is 'x', expected an integer"),
        ({"path": "a.json", "weight": 0}, "weight is 0, expected a number above 0 and up to 1000"),
        ({"path": "a.json", "weight": float("nan")}, "weight is nan, expected a number"),
        ({"path": "a.json", "weight": "2"}, "weight is '2', expected a number"),
        ({"path": "a.json", "weight": True}, "weight is True, expected a number"),
        ({"path": "a.json", "sampling_strategy": "first"}, "sampling_strategy is 'first', expected all, or first, end"),
        ({"path": "a.json", "sampling_strategy": "first:0"}, "sampling_strategy is 'first:0'"),
        ({"path": "a.json", "sampling_strategy": "first:1.5"}, "sampling_strategy is 'first:1.5'"),
        ({"path": "a.json", "sampling_strategy": "end:120%"}, "sampling_strategy is 'end:120%'"),
        ({"path": "a.json", "sampling_strategy": "middle:3"}, "sampling_strategy is 'middle:3'"),
        ({"path": "a.json", "sampling_strategy": 3}, "sampling_strategy is 3"),
    ],
)
def test_every_mistake_in_a_mixture_is_named_at_once(tmp_path, entry, expected):
    write(tmp_path / "a.json", "a", 2)
    path = mixture(tmp_path, {"path": "a.json"}, entry, {"path": "gone.json"})
    with pytest.raises(ConfigError) as caught:
        open_sources(path, options(tmp_path))
    lines = str(caught.value).splitlines()
    assert lines[0].startswith(f"{path}, entry 1: ") and expected in lines[0]
    assert lines[-1].startswith(f"{path}, entry 2: ") and "gone.json: no such file" in lines[-1]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("datasets: [", "can't be read as a YAML mixture"),
        ("datasets: []", "is not a mixture: expected 'datasets:' with a list"),
        ("3", "is not a mixture"),
        ("dataset:\n- path: a.json", "unknown key 'dataset': did you mean datasets?"),
        ("- path: a.json\n  x: !!python/object/apply:os.getpid []", "can't be read as a YAML mixture"),
        ("\x00", "can't be read as a YAML mixture"),
    ],
)
def test_what_is_no_mixture_is_refused(tmp_path, text, expected):
    (tmp_path / "m.yaml").write_text(text)
    with pytest.raises(ConfigError, match=expected):
        open_sources(str(tmp_path / "m.yaml"), options(tmp_path))
    with pytest.raises(ConfigError, match="can't be read as a YAML mixture"):
        open_sources(str(tmp_path / "none.yaml"), options(tmp_path))


def test_patterns_are_read_in_their_order(tmp_path):
    for name in "abc":
        write(tmp_path / f"{name}.json", name, 2)
    braces = open_sources(f"{tmp_path}/{{c,a}}.json", options(tmp_path))
    assert ids(braces) == ["c0", "c1", "a0", "a1"]
    records = list(braces[0].read())
    assert [record.index for record in records] == [0, 1, 2, 3] and records[2].file.endswith("a.json")
    assert isinstance(records[0], RawRecord) and " of 2 files; " in braces[0].describe()
    assert ids(open_sources(f"{tmp_path}/?.json", options(tmp_path))) == ["a0", "a1", "b0", "b1", "c0", "c1"]
    assert len(read_samples(f"{tmp_path}/*.json", None)) == 6
    (tmp_path / "odd[1]{2}.json").write_text((tmp_path / "a.json").read_text())
    assert ids(open_sources(f"{tmp_path}/odd[1]{{2}}.json", options(tmp_path))) == ["a0", "a1"]


def test_number_ranges_keep_their_zeros(tmp_path):
    for name in ("s-08", "s-09", "s-10"):
        write(tmp_path / f"{name}.json", name, 1)
    files = expand(f"{tmp_path}/s-{{08..10}}.json")
    assert [Path(file).name for file in files] == ["s-08.json", "s-09.json", "s-10.json"]
    for pattern in ("x{0..99999999}", "{0..9999}{0..9999}{0..9999}"):
        with pytest.raises(ConfigError, match="more than 100,000 files"):
            expand(pattern)


def test_a_data_path_that_can_not_be_read_says_what_can(tmp_path):
    def refused(path: object) -> str:
        with pytest.raises(ConfigError) as caught:
            open_sources(str(path), options(tmp_path))
        return str(caught.value)

    write(tmp_path / "a.json", "a", 1)
    write(tmp_path / "b.jsonl", "b", 1)
    assert "none.json: no such file or folder" in refused(tmp_path / "none.json")
    assert "z.json: no such file" in refused(f"{tmp_path}/{{a,z}}.json")
    assert "z*.json: no such file" in refused(tmp_path / "z*.json")
    assert "several kinds: a JSON list (a.json), JSONL (b.jsonl)" in refused(tmp_path / "*.json*")
    assert "several kinds: a JSON list (a.json), JSONL (b.jsonl)" in refused(tmp_path)
    assert "is not a regular file" in refused("/dev/null")
    (tmp_path / "empty").mkdir()
    assert "has nothing to read (it is empty)" in refused(tmp_path / "empty")
    for name in ("train-0.parquet", "test-0.parquet"):
        (tmp_path / "empty" / name).write_bytes(b"")
    found = "holds the splits 'train' (train-0.parquet) and 'test' (test-0.parquet): choose one with --data_split train"
    assert found in refused(tmp_path / "empty")
    assert f"or name its files, like {tmp_path}/empty/train-0.parquet" in refused(tmp_path / "empty")
    (tmp_path / "empty" / "0.tar").write_bytes(b"")
    assert "holds .tar and .parquet files" in refused(tmp_path / "empty")
    for name in ("metadata.csv", "metadata.jsonl"):
        (tmp_path / "empty" / name).write_bytes(b"")
    assert "holds metadata.csv, metadata.jsonl: leave one of them" in refused(tmp_path / "empty")


def test_columns_are_parsed_or_every_mistake_named():
    assert parse_columns(None) == parse_columns("") == ()
    assert parse_columns("conversations=dialog, image = a picture") == (
        ("conversations", "dialog"),
        ("image", "a picture"),
    )
    with pytest.raises(ConfigError) as caught:
        parse_columns("imge=x,image,id=a,id=b,system=,question=q,answer=q")
    assert str(caught.value).removeprefix("--data_columns: ").split("; ") == [
        "unknown field 'imge': did you mean image?",
        "'image' is not field=column, like image=photo",
        "the field 'id' is named twice",
        "'system=' is not field=column, like image=photo",
        "the name 'q' is given for two fields",
    ]


def test_a_mixture_that_never_ends_is_refused(tmp_path):
    (tmp_path / "zero.yaml").symlink_to("/dev/zero")
    with pytest.raises(ConfigError, match="not a regular file"):
        open_sources(str(tmp_path / "zero.yaml"), SourceOptions())


@pytest.mark.parametrize("key", ["path", "columns", "weight", "seed", "sampling_strategy"])
def test_a_mixture_that_unfolds_without_end_is_refused(tmp_path, key):
    lists = ["&a0 [x]", *(f"&a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12))]
    entry = "*a11" if key == "path" else f"{{path: a.json, {key}: *a11}}"
    path = tmp_path / "bomb.yaml"
    path.write_text("".join(f"- {line}\n" for line in [*lists, entry]))
    (tmp_path / "a.json").write_text('[{"conversations": []}]')
    with pytest.raises(ConfigError) as caught:
        open_sources(str(path), SourceOptions())
    assert len(str(caught.value)) < 20_000


def test_data_sources_have_short_names_that_differ():
    assert short_names(["/data/llava.json", "/data/vqa.jsonl"]) == ["llava", "vqa"]
    assert short_names(["/data/a/x.json", "/data/b/x.json"]) == ["a/x.json", "b/x.json"]
    assert short_names(["/data/x.json"] * 2) == ["/data/x.json (1)", "/data/x.json (2)"]
    assert short_names(["coco/train.json", "sqa/train.json"]) == ["coco/train.json", "sqa/train.json"]
    assert short_names(["x.json", "x.json", "y.json"]) == ["x.json (1)", "x.json (2)", "y.json"]
