"""Lines about files of a folder that transformers passes over, and that say something else than those it takes."""

from pathlib import Path

import transformers

from llava_ds.files.model_files import ADAPTER_FILES, is_adapter
from llava_ds.files.processor_files import processor_template, settings_passed_over, templates_passed_over
from llava_ds.model.open.weights import difference, weights_passed_over


def passed_over(
    path: str | Path, where: str, *, images: bool = True, template: bool = False, weights: bool = True
) -> list[str]:
    """One line about all files of a folder that are passed over, or none.

    where: the beginning of error messages; images, template, weights: these are taken from the folder.
    """
    clauses = settings_passed_over(path, where) if images else []
    if template and (taken := processor_template(path, where)) is not None:
        clauses += templates_passed_over(path, where, taken)
    if is_adapter(path):
        clauses += _adapters_passed_over(Path(path))
    elif weights:
        clauses += weights_passed_over(path)
    order = f"{path} has files that disagree, and the order of transformers {transformers.__version__} decides"
    return [f"{order}: {'; '.join(clauses)}"] if clauses else []


def _adapters_passed_over(path: Path) -> list[str]:
    """A clause about a second file of an adapter's weights, which peft does not read, or none."""
    files = [file for name in ADAPTER_FILES if (file := path / name).is_file()]
    differs = difference(files[:1], files[1:]) if len(files) > 1 else ""
    return [f"weights are those of {files[0].name}: {files[1].name}, {differs}, is passed over"] if differs else []
