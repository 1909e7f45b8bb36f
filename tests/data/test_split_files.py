"""A folder's files are split as `datasets` splits them, and none of another split is trained on unasked."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import datasets
import pyarrow
import pyarrow.parquet
import pytest
from datasets.data_files import DataFilesDict, get_data_patterns

from llava_ds.constants import ConfigError
from llava_ds.data.sources import Source, SourceOptions, open_sources, to_sample
from llava_ds.data.sources.split_files import splits_of_names


def write(path: Path, answer: str = "") -> None:
    """A file with one record, which answers with the file's name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    record = {"question": "Which file?", "answer": answer or path.name}
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([record]), path)
    elif path.suffix == ".csv":
        path.write_text(f"question,answer\n{record['question']},{record['answer']}\n")
    else:
        path.write_text(json.dumps(record) + "\n")


def opened(path: object, split: str | None = None) -> Source:
    [source] = open_sources(str(path), SourceOptions(split=split, cache_dir=f"{path}-cache"))
    return source


def read(source: Source) -> list[str]:
    return [to_sample(record.text, source, 0).messages[1].text for record in source.read()]


def refused(path: object, split: str | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        opened(path, split)
    return str(caught.value)


# Names of a folder's files, and the splits that they are in.
FOLDERS = {
    "shards of a hub": (
        [
            "data/train-00000-of-00002.parquet",
            "data/train-00001-of-00002.parquet",
            "data/testmini-00000-of-00001.parquet",
        ],
        {"train": 2, "testmini": 1},
    ),
    "referring expressions": (
        ["data/train-00000-of-00001.parquet", "data/testA-00000-of-00001.parquet", "data/testB-00000-of-00001.parquet"],
        {"train": 1, "testA": 1, "testB": 1},
    ),
    "COCO": (["train2017.jsonl", "val2017.jsonl"], {"train": 1, "validation": 1}),
    "COCO, more": (
        ["train2014.jsonl", "minival2014.jsonl", "testdev2015.jsonl"],
        {"train": 1, "minival": 1, "testdev": 1},
    ),
    "capitals": (["Train.csv", "Test.csv", "VAL.csv"], {"train": 1, "test": 1, "validation": 1}),
    "numbers": (["train.jsonl", "test1k.jsonl"], {"train": 1, "test": 1}),
    "dev": (["train-0.parquet", "train-1.parquet", "dev.parquet"], {"train": 2, "validation": 1}),
    "held out": (["train.jsonl", "holdout.jsonl"], {"train": 1, "holdout": 1}),
    "held out, and no train": (["charts.jsonl", "docs.jsonl", "heldout.jsonl"], {"train": 2, "heldout": 1}),
    "folders": (["train/a.jsonl", "train/b.jsonl", "evaluation/a.jsonl"], {"train": 2, "test": 1}),
    "shards beside each other": (
        ["train-00000-of-00001.parquet", "holdout-00000-of-00001.parquet"],
        {"train": 1, "holdout": 1},
    ),
    "subsets with splits": (
        ["ai2d/train-00000-of-00001.parquet", "ai2d/test-00000-of-00001.parquet", "chart/train-00000-of-00001.parquet"],
        {"train": 2, "test": 1},
    ),
    "a name that datasets refuses": (
        ["data/train-00000-of-00001.parquet", "data/test-mini-00000-of-00001.parquet"],
        {"train": 1, "test-mini": 1},
    ),
    "another file beside train": (["train.parquet", "extra.parquet"], {"train": 1, "extra": 1}),
    "no letter between": (["vqatrain.jsonl", "vqatest.jsonl"], {"train": 1, "vqatest": 1}),
    "no train": (["myval.jsonl", "mytest.jsonl"], {"test": 1, "validation": 1}),
    "a part of val": (["cocotrain2017.jsonl", "cocominival2014.jsonl"], {"train": 1, "cocominival": 1}),
    "sets": (["trainset.jsonl", "valset.jsonl"], {"trainset": 1, "valset": 1}),
    "folders without a separator": (["vqatrain/a.jsonl", "vqaeval/a.jsonl"], {"train": 1, "vqaeval": 1}),
    "stages, and an evaluation without a separator": (
        ["pretrain.jsonl", "finetune.jsonl", "llavaeval.jsonl"],
        {"train": 2, "llavaeval": 1},
    ),
    "testmini alone beside data": (["docs.csv", "mini_test.csv"], {"docs": 1, "test": 1}),
}
WHOLE = {
    "two subsets": ["ai2d/train-00000-of-00001.parquet", "chart/train-00000-of-00001.parquet"],
    "parts": ["part-0.parquet", "part-1.parquet"],
    "words that only look like splits": ["retrieval.jsonl", "latest.jsonl", "interval.jsonl", "devices.jsonl"],
    "training": ["my_training_0.csv", "my_training_1.csv"],
    "stages of LLaVA's training": ["pretrain.jsonl", "finetune.jsonl"],
    "stages in folders": ["pretrain/a.jsonl", "finetune/b.jsonl", "finetune/c.jsonl"],
    "a word that ends like train": ["constraint.jsonl", "terrain.jsonl", "restrained.jsonl"],
    "training, without a separator": ["vqatrain.jsonl", "coco/reftrain.jsonl"],
}


@pytest.mark.parametrize("name", FOLDERS)
def test_several_splits_are_refused_until_one_is_named(tmp_path, name):
    names, expected = FOLDERS[name]
    for file in names:
        write(tmp_path / "d" / file, answer=file)
    message = refused(tmp_path / "d")
    assert "holds the splits" in message and f"choose one with --data_split {next(iter(expected))}" in message
    for split, number in expected.items():
        assert repr(split) in message
        source = opened(tmp_path / "d", split)
        others = [other for other in expected if other != split]
        assert len(read(source)) == number and f"; the split {split!r}, and not " in source.describe()
        assert all(repr(other) in source.describe() for other in others)
    assert f"has no split 'none': it holds {next(iter(expected))!r} (" in refused(tmp_path / "d", "none")


@pytest.mark.parametrize("name", WHOLE)
def test_one_split_is_taken_whole(tmp_path, name):
    for file in WHOLE[name]:
        write(tmp_path / "d" / file, answer=file)
    for split in (None, "train"):
        source = opened(tmp_path / "d", split)
        assert sorted(read(source)) == sorted(WHOLE[name]) and "; the split" not in source.describe()
    folders = sorted({file.split("/")[0] for file in WHOLE[name] if "/" in file})
    assert (f"; the folders {', '.join(map(repr, folders))} together" in source.describe()) == (len(folders) > 1)


@pytest.mark.parametrize("name", [*FOLDERS, *WHOLE])
def test_what_datasets_finds_is_what_is_found(tmp_path, name):
    """Its splits have the same files here; those that it leaves out are in other splits."""
    names = FOLDERS[name][0] if name in FOLDERS else WHOLE[name]
    if name == "a name that datasets refuses":
        return
    for file in names:
        write(tmp_path / file)
    patterns = get_data_patterns(str(tmp_path))
    found = {
        split: sorted(str(Path(file).relative_to(tmp_path)) for file in files)
        for split, files in DataFilesDict.from_patterns(patterns, str(tmp_path)).items()
    }
    own = splits_of_names(names)
    if patterns != {"train": ["**"]}:
        assert {split: own[split] for split in found} == found
    else:
        assert sorted(file for files in own.values() for file in files) == found["train"]


def test_a_split_may_be_named_by_its_keyword_or_a_pattern(tmp_path):
    for file in ("train.jsonl", "dev.jsonl"):
        write(tmp_path / "d" / file)
    assert read(opened(tmp_path / "d", "dev")) == read(opened(tmp_path / "d", "validation")) == ["dev.jsonl"]
    assert read(opened(f"{tmp_path}/d/dev*.jsonl")) == ["dev.jsonl"]
    assert len(read(opened(f"{tmp_path}/d/*.jsonl"))) == 2  # what one writes is what one gets
    assert "dev.jsonl is not a folder with splits: leave the split 'test' out" in refused(
        tmp_path / "d/dev.jsonl", "test"
    )


def test_a_folder_with_one_split_that_is_no_train_says_so(tmp_path):
    for file in ("test-00000-of-00002.parquet", "test-00001-of-00002.parquet"):
        write(tmp_path / "d" / file)
    source = opened(tmp_path / "d")
    assert len(read(source)) == 2 and "; its only split, 'test'" in source.describe()
    write(tmp_path / "e" / "val2017.jsonl")
    assert "; its only split, 'validation'" in opened(tmp_path / "e").describe()
    write(tmp_path / "f" / "devices.jsonl")
    assert "its only split" not in opened(tmp_path / "f").describe()


def test_hidden_files_and_those_of_other_kinds_are_not_read(tmp_path):
    for file in ("a.jsonl", ".cache/b.jsonl", "__pycache__/c.jsonl", ".d.jsonl", "dataset_infos.json", "notes.txt"):
        write(tmp_path / "d" / file)
    assert read(opened(tmp_path / "d")) == ["a.jsonl"]
    write(tmp_path / "d" / "b.csv")
    assert "matches files of several kinds: JSONL (a.jsonl), CSV (b.csv)" in refused(tmp_path / "d")


def test_folders_of_images_have_splits(tmp_path):
    for split in ("train", "test"):
        for name in ("metadata.csv",):
            write(tmp_path / "d" / split / name, answer=split)
    assert "holds the splits 'train' (train/metadata.csv) and 'test'" in refused(tmp_path / "d")
    source = opened(tmp_path / "d", "test")
    assert (
        source.kind == "imagefolder" and source.image_root == str(tmp_path / "d" / "test") and read(source) == ["test"]
    )
    for subset in ("a", "b"):
        write(tmp_path / "e" / "train" / subset / "metadata.jsonl")
    assert "has several folders with metadata (" in refused(tmp_path / "e")


README = """---
license: mit
configs:
- config_name: {first}
  data_files:
  - split: fit
    path: sub/one*.parquet
  - split: check
    path: [sub/two.parquet, three.parquet]
- config_name: other
  data_files: four.parquet
---
# A data set
"""


def test_the_configs_of_a_readme_count(tmp_path):
    for file in ("sub/one-0.parquet", "sub/one-1.parquet", "sub/two.parquet", "three.parquet", "four.parquet"):
        write(tmp_path / "d" / file)
    readme = tmp_path / "d" / "README.md"
    readme.write_text(README.format(first="default"))
    assert "holds the splits 'fit' (2 files, like sub/one-0.parquet) and 'check' (2 files, like" in refused(
        tmp_path / "d"
    )
    source = opened(tmp_path / "d", "fit")
    assert read(source) == ["one-0.parquet", "one-1.parquet"]
    assert "; README.md's config 'default', and not 'other'" in source.describe()
    assert read(opened(tmp_path / "d", "check")) == ["two.parquet", "three.parquet"]
    readme.write_text(README.format(first="some"))  # no default one: a split that one config has alone says which
    source = opened(tmp_path / "d", "train")
    assert read(source) == ["four.parquet"] and "; README.md's config 'other', and not 'some'" in source.describe()


def test_one_of_several_configs_has_to_be_named(tmp_path):
    """As load_dataset asks for one, too."""
    for name in ("ai2d", "chart", "docs"):
        for number in range(2):
            write(tmp_path / "d" / name / f"train-{number}.parquet")
    configs = [f"- config_name: {name}\n  data_files: {name}/train-*.parquet\n" for name in ("ai2d", "chart", "docs")]
    readme = tmp_path / "d" / "README.md"
    readme.write_text(f"---\nconfigs:\n{''.join(configs)}---\n")
    for split in (None, "train"):
        message = refused(tmp_path / "d", split)
        assert "README.md has the configs 'ai2d', 'chart', 'docs', and none is the default" in message
        pattern = f"{tmp_path}/d/ai2d/train-*.parquet"
        assert f"like {pattern} for 'ai2d'" in message
    assert read(opened(pattern)) == ["train-0.parquet", "train-1.parquet"]
    with pytest.raises(ValueError, match="Config name is missing"):
        datasets.load_dataset(str(tmp_path / "d"))
    readme.write_text(f"---\nconfigs:\n{''.join(configs)}  default: true\n---\n")
    source = opened(tmp_path / "d")
    assert len(read(source)) == 2 and "; README.md's config 'docs', and not 'ai2d', 'chart'" in source.describe()
    # The files of the others were not downloaded.
    readme.write_text(f"---\nconfigs:\n{''.join(configs)}---\n")
    for name in ("ai2d", "chart"):
        shutil.rmtree(tmp_path / "d" / name)
    assert "; README.md's config 'docs', and not 'ai2d', 'chart'" in opened(tmp_path / "d").describe()


def test_a_readme_of_other_files_or_of_nonsense(tmp_path):
    write(tmp_path / "d" / "train.parquet")
    readme = tmp_path / "d" / "README.md"
    readme.write_text("---\nconfigs:\n- config_name: a\n  data_files: hf://datasets/x/y.parquet\n---\n")
    assert read(opened(tmp_path / "d")) == ["train.parquet"]
    for configs in ("- config_name: a\n  data_files: 3\n", "3\n", "- config_name: a\n  data_files: '**.csv'\n"):
        readme.write_text(f"---\nconfigs:\n{configs}---\n")
        assert "README.md" in refused(tmp_path / "d") and "can't be read" in refused(tmp_path / "d")


def test_a_mixture_names_splits(tmp_path):
    for split in ("train", "test"):
        write(tmp_path / "d" / f"{split}.jsonl")
    (tmp_path / "mix.yaml").write_text(
        "datasets:\n- {path: d, split: test}\n- {path: d, split: train}\n- path: d/train.jsonl\n"
    )
    sources = open_sources(str(tmp_path / "mix.yaml"), SourceOptions(cache_dir=str(tmp_path / "c")))
    assert [read(source) for source in sources] == [["test.jsonl"], ["train.jsonl"], ["train.jsonl"]]
    (tmp_path / "mix.yaml").write_text("datasets:\n- {path: d, split: [test]}\n- path: d\n")
    message = refused(tmp_path / "mix.yaml")
    assert "entry 0: split is ['test'], expected text" in message and "entry 1: " in message
    assert "split: in a mixture" in message
    assert "mix.yaml is a mixture: leave the split 'x' out, and give its entries split:" in refused(
        tmp_path / "mix.yaml", "x"
    )


def test_one_file_needs_no_datasets(tmp_path):
    """Importing it takes a third of a second."""
    write(tmp_path / "d" / "train.jsonl")
    code = "import sys; from llava_ds.data.sources import *; "
    code += f"open_sources({str(tmp_path / 'd')!r}, SourceOptions(cache_dir={str(tmp_path)!r})); "
    code += "sys.exit('datasets' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("names", "split", "pattern"),
    [
        (["train/000.parquet", "val/000.parquet"], "train", "train/000.parquet"),  # a folder's only file, a number
        (["train/a.jsonl", "train/b.jsonl", "dev/a.jsonl"], "train", "train/*.jsonl"),  # all of its files
        (["charts/train.jsonl", "docs/train.jsonl", "charts/test.jsonl"], "train", "*/train*.jsonl"),
        (["data/test_sft-00000-of-00001.parquet", "data/train_sft-00000-of-00001.parquet"], "train_sft", "train_sft-"),
        (["a/train.jsonl", "train.jsonl", "b/dev.jsonl"], "train", None),  # which no simple pattern tells apart
    ],
)
def test_the_split_and_the_pattern_of_a_message_are_ones_to_train_on(tmp_path, names, split, pattern):
    for name in names:
        write(tmp_path / name)
    message = refused(tmp_path)
    assert f"--data_split {split} " in message
    taken = opened(tmp_path, split).files
    if pattern is None:
        assert "name its files" not in message
    else:
        suggested = message.partition("name its files, like ")[2]
        assert pattern in suggested and set(opened(suggested).files) == set(taken)


def test_words_for_other_data_are_splits(tmp_path):
    for name in ("data.jsonl", "validate.jsonl", "benchmark_v2.jsonl"):
        write(tmp_path / name)
    assert read(opened(tmp_path, "train")) == ["data.jsonl"]
