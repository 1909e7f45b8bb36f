"""Find the splits of a folder's files by the rules of `datasets`: README.md's configs, or names of files and folders.

`datasets` may leave a file out although it finds another split, or take all files for "train" although some are named
like another split (testmini, Val). Here such files form separate splits, so that none is trained on unintentionally.
"""

import itertools
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass

from llava_ds.constants import ConfigError
from llava_ds.files.places import is_file, join, open_data, relative_to

TRAIN = "train"
MAX_README_BYTES = 4 << 20
# Names of splits for which the datasets library has no keyword, and common prefixes and suffixes of keywords.
HELD_OUT = ("holdout", "heldout", "validate", "benchmark")
AFFIXES = (
    "", "a", "b", "c", "mini", "small", "tiny", "full", "set", "split", "std", "public", "private", "hard", "all",
)  # fmt: skip

_WORDS = re.compile(r"[A-Za-z]+")
_MAYBE_OTHER = re.compile("val|test|dev|eval|h[oe]ld", re.IGNORECASE)  # examine a single file with such a name
_SHARD = re.compile(r"^(.*?)[-._ ]*\d*(?:[-._ ]+of[-._ ]+\d+)?(?:\.[^.]*)?$")


@dataclass(frozen=True)
class Chosen:
    """The files of a split, and a note for the line about the source ("" if none)."""

    files: tuple[str, ...]
    note: str = ""


def choose_files(folder: str, files: list[str], split: str | None) -> Chosen:
    """Choose the files of the split, or of the only split. Raises ConfigError if a split must be named, or doesn't
    exist."""
    names = {relative_to(file, folder): file for file in files}
    splits, read_by = _splits(folder, list(names), split)
    found = " and ".join(f"{each!r} ({_some(part)})" for each, part in splits.items())
    if split is None and len(splits) > 1:
        first, part = next(iter(splits.items()))
        pattern = _pattern_for(part, list(names))
        files = f", or name its files, like {join(folder, pattern)}" if pattern else ""
        raise ConfigError(
            f"{folder} holds the splits {found}: choose one with --data_split {first} (--eval_data_split for "
            f"--eval_data_path, split: in a mixture, --split of run/evaluate.py){files}"
        )
    split = _known_split(split, splits)
    if split is not None and split not in splits:
        raise ConfigError(f"{folder} has no split {split!r}: it holds {found}")
    taken = next(iter(splits)) if split is None else split
    others = [name for name in splits if name != taken]
    notes = []
    if others:
        notes.append(f"the split {taken!r}, and not {', '.join(map(repr, others))}")
    elif taken != TRAIN:
        notes.append(f"its only split, {taken!r}")
    subsets = sorted({name.partition("/")[0] for name in splits[taken] if name.count("/")})
    if len(subsets) > 1:
        some = ", ".join(map(repr, subsets[:8])) + (f" and {len(subsets) - 8} more" if len(subsets) > 8 else "")
        notes.append(f"the folders {some} together")
    return Chosen(tuple(names[name] for name in splits[taken]), "; ".join([*notes, *read_by]))


def _known_split(split: str | None, splits: Iterable[str]) -> str | None:
    """Resolve a keyword to its split's name, such as val to validation."""
    if split is None or split in splits:
        return split
    from datasets.data_files import SPLIT_KEYWORDS

    return next((str(name) for name, keywords in SPLIT_KEYWORDS.items() if split in keywords and name in splits), split)


def _splits(folder: str, names: list[str], split: str | None) -> tuple[dict[str, list[str]], list[str]]:
    """Group sorted names of files by split, with notes on how the splits were found."""
    configs = _configs(folder)
    if configs is not None:
        found = _splits_of_configs(folder, names, configs, split)
        if found is not None:
            return found
    if len(names) < 2 and split is None and not any(map(_MAYBE_OTHER.search, names)):
        return {TRAIN: sorted(names)}, []
    return splits_of_names(names), []


def splits_of_names(names: Iterable[str]) -> dict[str, list[str]]:
    """Group relative file names by the split in their names: "train" first, then splits with that word."""
    names = sorted(names)
    from datasets.data_files import SPLIT_PATTERN_SHARDED  # imports pandas: only for folders of several files

    shape = os.path.basename(SPLIT_PATTERN_SHARDED)
    sharded = re.compile(_regex(shape.replace("{split}", "SPLIT")).replace("SPLIT", "(?P<split>.+)"))
    shards = [sharded.match(os.path.basename(name)) for name in names]
    if all(shards):  # train-00000-of-00002.parquet, in whatever folder
        return _grouped(names, [shard["split"] for shard in shards])
    lower = {name.lower(): name for name in names}  # so that Train and VAL match as well
    known = lower if len(lower) == len(names) else {name: name for name in names}
    found = _by_patterns(list(known))
    if found is None:
        return _grouped(names, _splits_by_words(names))
    split_of = {known[name]: split for split, part in found.items() for name in part}
    return _grouped(names, _name_others(names, [split_of.get(name) or _split_word(_no_ending(name)) for name in names]))


def _by_patterns(names: list[str]) -> dict[str, list[str]] | None:
    """Group the names that match a split pattern of datasets; None if only its pattern for all files matches."""
    from datasets.data_files import DEFAULT_PATTERNS_ALL, _get_data_files_patterns

    def resolve(pattern: str) -> list[str]:
        found = _matching(names, pattern)
        if not found:
            raise FileNotFoundError(pattern)
        return found

    try:
        patterns = _get_data_files_patterns(resolve)
    except ValueError:  # a split's name with a character that datasets refuses
        return None
    if patterns == DEFAULT_PATTERNS_ALL:
        return None
    found: dict[str, list[str]] = {}
    taken: set[str] = set()
    for split, each in patterns.items():
        part = sorted({name for pattern in each for name in _matching(names, pattern)} - taken)
        taken.update(part)
        found[str(split)] = part
    return found


def _splits_by_words(names: list[str]) -> list[str]:
    """Find the split of each name when no pattern of datasets separates them: "train" by default.

    If some name has a word such as mytrain, a name with a word such as mytest is a separate split. So are names that
    differ only in a keyword (myval, mytest), and those found by _split_word. But finetune and pretrain are one split:
    finetune has no keyword.
    """
    from datasets.data_files import SPLIT_KEYWORDS

    words = {str(split): "|".join(keywords) for split, keywords in SPLIT_KEYWORDS.items()}
    edges = {split: re.compile(rf"(?ai)(?<![a-z])(?:{each})|(?:{each})(?![a-z])") for split, each in words.items()}
    stems = [_no_ending(name) for name in names]
    found = [[split for split, edge in edges.items() if edge.search(stem)] for stem in stems]
    shapes = [{s: re.sub(r"\d+", "#", edges[s].sub("*", stem)) for s in own} for stem, own in zip(stems, found)]
    has_train = any(TRAIN in each for each in shapes)
    splits = []
    for stem, own in zip(stems, shapes):
        split = _split_word(stem)
        if split is None and has_train and own and TRAIN not in own:
            split = next(word for word in _WORDS.findall(stem) if any(edges[s].search(word) for s in own))
        elif split is None and not has_train:
            split = next((s for s in own if any(own[s] in each.values() and s not in each for each in shapes)), None)
        splits.append(split or TRAIN)
    return splits


def _no_ending(name: str) -> str:
    return os.path.splitext(name)[0]


def _split_word(stem: str) -> str | None:
    """Find a word in a path that is a split keyword with an affix, such as testmini, or is in HELD_OUT; otherwise
    None."""
    from datasets.data_files import SPLIT_KEYWORDS

    keywords = "|".join(keyword for keywords in SPLIT_KEYWORDS.values() for keyword in keywords)
    affix = f"(?:{'|'.join(AFFIXES)}|{keywords})"
    odd = re.compile(f"(?:{keywords}){affix}|{affix}(?:{keywords})|{'|'.join(HELD_OUT)}", re.IGNORECASE)
    return next(filter(odd.fullmatch, _WORDS.findall(stem)), None)


def _name_others(names: list[str], splits: list[str | None]) -> list[str]:
    """Name each missing split (None) after the file or the nearest folder whose name no file with a split has."""
    taken = {_own_name(part) for name, split in zip(names, splits) if split is not None for part in name.split("/")}
    parts = [[_own_name(part) for part in reversed(name.split("/"))] for name in names]
    return [split or next((part for part in each if part not in taken), each[0]) for split, each in zip(splits, parts)]


def _own_name(name: str) -> str:
    """The name of a file or folder without its ending and number."""
    base = os.path.basename(name)
    return _SHARD.match(base)[1] or base


def _grouped(names: list[str], splits: list[str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name, split in zip(names, splits):
        found.setdefault(split, []).append(name)
    order = sorted(found, key=lambda split: (split != TRAIN, TRAIN not in split.lower(), split))
    return {split: found[split] for split in order}


def _configs(folder: str) -> dict[str, dict] | None:
    """Read the configs of a hub clone from README.md, by name, the default first; None if it has none."""
    path = join(folder, "README.md")
    if not is_file(path):
        return None
    with open_data(path) as file:
        text = file.read(MAX_README_BYTES).decode("utf-8", "replace")
    if not text.startswith("---") or "\nconfigs:" not in text:
        return None
    from datasets.utils.metadata import MetadataConfigs
    from huggingface_hub import DatasetCard

    try:
        configs = MetadataConfigs.from_dataset_card_data(DatasetCard(text, ignore_metadata_errors=True).data)
        default = configs.get_default_config_name()
    except Exception as error:  # YAML of any shape
        raise ConfigError(
            f"{path}: its configs can't be read, so name the data's files by a pattern: {error}"
        ) from None
    return dict(configs) if default is None else {default: configs[default], **configs}


def _splits_of_configs(
    folder: str, names: list[str], configs: dict[str, dict], split: str | None
) -> tuple[dict[str, list[str]], list[str]] | None:
    """Group names by split as in README.md, with a note; None if its patterns match no file. Raises ConfigError if
    several configs are possible and none is the default."""
    from datasets.utils.metadata import MetadataConfigs

    default = MetadataConfigs(configs).get_default_config_name()
    found = {config: _files_of_config(configs[config], names) for config in ([default] if default else configs)}
    found = {config: splits for config, splits in found.items() if splits}
    if not found:
        return None
    fitting = [config for config, splits in found.items() if _known_split(split, splits) in splits] if split else []
    if len(found) > 1 and len(fitting) != 1:
        raise ConfigError(_which_config(folder, names, found))
    taken = fitting[0] if len(found) > 1 else next(iter(found))
    others = [config for config in configs if config != taken]
    some = ", ".join(map(repr, others[:8])) + (f" and {len(others) - 8} more" if len(others) > 8 else "")
    return found[taken], [f"README.md's config {taken!r}, and not {some}"] if others else []


def _files_of_config(config: dict, names: list[str]) -> dict[str, list[str]]:
    """Group the names of a config's files by split."""
    from datasets.data_files import sanitize_patterns

    inside = str(config.get("data_dir") or "").strip("/")
    files = config.get("data_files")
    if files is None:
        here = [name for name in names if not inside or name.startswith(f"{inside}/")]
        return splits_of_names(here) if here else {}
    patterns = sanitize_patterns(files)
    full = {split: [f"{inside}/{p}" if inside else p for p in each] for split, each in patterns.items()}
    parts = {str(split): {n for p in each for n in _matching(names, p)} for split, each in full.items()}
    return {split: sorted(part) for split, part in parts.items() if part}


def _which_config(folder: str, names: list[str], found: dict[str, dict[str, list[str]]]) -> str:
    """Build the error message for several configs without a default."""
    shown = ", ".join(map(repr, [*found][:8])) + (f" and {len(found) - 8} more" if len(found) > 8 else "")
    first = next(iter(found))
    part = next(iter(found[first].values()))
    example = join(folder, _pattern_for(part, names) or part[0])
    return (
        f"{folder}: README.md has the configs {shown}, and none is the default: name the files of one by a pattern, "
        f"like {example} for {first!r}, or of several by a wider pattern or a mixture"
    )


def _matching(names: Iterable[str], pattern: str) -> list[str]:
    try:
        matches = re.compile(_regex(pattern.removeprefix("./"))).match
    except (ValueError, re.error) as error:
        raise ConfigError(f"the pattern {pattern!r} in README.md can't be read: {error}") from None
    return [name for name in names if matches(name)]


def _regex(pattern: str) -> str:
    from fsspec.utils import glob_translate

    return glob_translate(pattern)


def _pattern_for(part: list[str], names: list[str]) -> str | None:
    """Return a pattern that matches exactly these files; None if no simple one does."""
    ending = os.path.splitext(part[0])[1]
    stems = [_no_ending(name) for name in part]
    bases = [os.path.basename(stem) for stem in stems]
    simple = (part[0], f"{_shared_start(stems)}*{ending}", f"*/{_shared_start(bases)}*{ending}")
    return next((each for each in simple if sorted(_matching(names, each)) == part), None)


def _shared_start(names: list[str]) -> str:
    pairs = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(min(names), max(names)))
    return "".join(one for one, _ in pairs)


def _some(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{len(names):,} files, like {names[0]}"
