"""Report files in model folders that transformers ignores, if they differ from the files that it reads instead."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

import torch
import transformers
from safetensors import safe_open

from llava_ds.constants import ConfigError, DataError
from llava_ds.files.model_files import (
    ADAPTER_FILES,
    TEMPLATES_FOLDER,
    is_adapter,
    is_there,
    library_errors,
    own_file,
    read_json_if_there,
    shown,
)
from llava_ds.files.processor_files import (
    IMAGE_PROCESSOR_NAME,
    NAMES_OF_KINDS,
    PROCESSOR_NAME,
    TEMPLATE_FILES,
    VIDEO_PROCESSOR_NAME,
    image_processor,
    image_settings,
    old_template,
    processor_template,
    settings_files,
    video_settings,
)
from llava_ds.model.open.pickles import load_pickle
from llava_ds.model.open.weights import WHOLE, names_in, shapes_in, weight_files


def ignored_files_of_folder(
    path: str | Path, where: str, *, images: bool = True, template: bool = False, weights: bool = True
) -> list[str]:
    """Return a line about the ignored files of a folder that differ, or [].

    where: prefix of error messages; images, template, weights: True to compare files with these contents.
    """
    clauses = ignored_settings(path, where) if images else []
    if template and (taken := processor_template(path, where)) is not None:
        clauses += ignored_templates(path, where, taken)
    if is_adapter(path):
        clauses += _ignored_adapters(Path(path))
    elif weights:
        clauses += ignored_weights(path)
    order = f"{path} has files that disagree, and the order of transformers {transformers.__version__} decides"
    return [f"{order}: {'; '.join(clauses)}"] if clauses else []


def _ignored_adapters(path: Path) -> list[str]:
    """Return a clause about a second file of adapter weights that peft ignores, if it differs; else []."""
    files = [file for name in ADAPTER_FILES if (file := path / name).is_file()]
    differs = difference(files[:1], files[1:]) if len(files) > 1 else ""
    return [f"weights come from {files[0].name}; {files[1].name} ({differs}) is ignored"] if differs else []


def ignored_weights(path: str | Path) -> list[str]:
    """Return clauses about weights of a folder that transformers ignores and that differ from those it reads.

    Compares names, shapes and the first row of every tensor.
    """
    path = Path(path)
    if not path.is_dir():
        return []
    try:
        taken = weight_files(path)
    except DataError:  # the code that reads the weights reports this error; an estimate reads no weights
        return []
    groups = {}
    for name in WHOLE:
        index = path / f"{name}.index.json"
        groups[name] = [path / name] if (path / name).is_file() else []
        with contextlib.suppress(DataError):  # an ignored index may be damaged
            groups[index.name] = [path / each for each in names_in(index)] if index.is_file() else []
    own = next((name for name, files in groups.items() if set(files) == set(taken)), taken[0].name)
    clauses = []
    for name, files in groups.items():
        if files and not set(files) & set(taken) and (differs := difference(taken, files)):
            clauses.append(f"weights come from {own}; {name} ({differs}) is ignored")
    return clauses


def difference(taken: list[Path], others: list[Path]) -> str:
    """Describe the difference between two sets of weight files, "" if they are equal."""
    try:
        first, second = (dict(pair for file in files for pair in _first_rows(file)) for files in (taken, others))
    except (DataError, OSError):
        return "can't be read"
    if first.keys() != second.keys():
        return f"has {len(second):,} tensors instead of {len(first):,}"
    other = [name for name, row in first.items() if not _is_same(row, second[name])]
    return f"{len(other):,} of {len(first):,} tensors differ, such as {other[0]}" if other else ""


def _first_rows(file: Path) -> Iterator[tuple[str, tuple[tuple[int, ...], torch.Tensor]]]:
    """Yield every tensor's name, shape and first row."""
    if file.suffix == ".safetensors":
        shapes = shapes_in(file)
        with safe_open(file, framework="pt") as opened:
            for name, shape in shapes.items():
                yield name, (shape, opened.get_slice(name)[:1] if shape and shape[0] else torch.empty(0))
    else:
        for name, tensor in load_pickle(file).items():
            yield name, (tuple(tensor.shape), tensor[:1].clone() if tensor.ndim else tensor)


def _is_same(one: tuple[tuple[int, ...], torch.Tensor], other: tuple[tuple[int, ...], torch.Tensor]) -> bool:
    """True if the shapes are equal, and the rows are equal in the coarser of the two precisions."""
    (shape, row), (other_shape, other_row) = one, other
    coarser = min(row.dtype, other_row.dtype, key=lambda dtype: dtype.itemsize)
    return shape == other_shape and torch.equal(row.to(coarser), other_row.to(coarser))


def ignored_settings(folder: str | Path, where: str) -> list[str]:
    """Describe settings files that transformers ignores and that differ from those it uses."""
    folder, clauses = Path(folder), []
    found = settings_files(folder, where)
    kinds = (("images", image_settings, IMAGE_PROCESSOR_NAME), ("videos", video_settings, VIDEO_PROCESSOR_NAME))
    for what, read, name in kinds:
        if name not in found:
            continue
        taken, file = read(folder, where)
        if file != name and (others := _others(folder, taken, found[name], what)):
            said = ", ".join(f"{key} {shown(new)} (taken: {shown(old)})" for key, (old, new) in others.items())
            which = f"settings for {what} come from {file}: {name} is not used"
            clauses.append(f"{which}, and its {said} has no effect on {what}")
    return clauses


def _others(folder: Path, taken: dict, other: dict, what: str) -> dict[str, tuple[object, object]]:
    """Return the settings that differ between two files, as (value used, value ignored) by name.

    Values are compared as transformers' class interprets them, including its defaults and former names. They are
    compared verbatim if no class works without torchvision, or if the class refuses them.
    """
    if taken == other:
        return {}
    names = set(other)
    if what == "images":
        with contextlib.suppress(ConfigError), library_errors(str(folder)):
            kind = type(image_processor(folder))
            taken, other = (json.loads(json.dumps(kind.from_dict(each).to_dict())) for each in (taken, other))
            names = set(kind.valid_kwargs.__annotations__)
    names -= set(NAMES_OF_KINDS)
    return {name: (taken.get(name), other.get(name)) for name in sorted(names) if taken.get(name) != other.get(name)}


def ignored_templates(folder: str | Path, where: str, template: str) -> list[str]:
    """Describe files with a chat template that differs from the one used; [] if all agree."""
    folder = Path(folder)
    texts: dict[str, object] = {TEMPLATE_FILES[0]: old_template(folder, where)}
    for name in (TEMPLATE_FILES[1], f"{TEMPLATES_FOLDER}/default.jinja"):
        if is_there(folder / name):
            with library_errors(where):
                texts[name] = own_file(folder / name).read_text(encoding="utf-8")
    for name in (PROCESSOR_NAME, "tokenizer_config.json"):
        texts[name] = _default(read_json_if_there(folder / name, where).get("chat_template"))
    same = {name: _as_rendered(text) == _as_rendered(template) for name, text in texts.items() if isinstance(text, str)}
    others = [name for name, is_same in same.items() if not is_same]
    if not others:
        return []
    taken = next((name for name, is_same in same.items() if is_same), "another file")
    which, be = " and ".join(others), "is" if len(others) == 1 else "are"
    return [f"the chat template comes from {taken}: {which}, with another one, {be} not used"]


def _default(templates: object) -> object:
    """Return the default among a tokenizer's named templates."""
    if isinstance(templates, list):
        return next((t.get("template") for t in templates if isinstance(t, dict) and t.get("name") == "default"), None)
    return templates


def _as_rendered(template: str) -> str:
    return template.removesuffix("\n")  # as jinja does
