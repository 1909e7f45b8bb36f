"""Lines about files of a folder that transformers passes over, and that say something else than those it takes."""

from pathlib import Path

import transformers

from llava_ds.files.processor_files import processor_template, settings_passed_over, templates_passed_over
from llava_ds.model.open.weights import weights_passed_over


def passed_over(
    path: str | Path, where: str, *, images: bool = True, template: bool = False, weights: bool = True
) -> list[str]:
    """One line about all files of a folder that are passed over, or none.

    where: the beginning of error messages; images, template, weights: these are taken from the folder.
    """
    clauses = settings_passed_over(path, where) if images else []
    if template and (taken := processor_template(path, where)) is not None:
        clauses += templates_passed_over(path, where, taken)
    if weights:
        clauses += weights_passed_over(path)
    order = f"{path} has files that disagree, and the order of transformers {transformers.__version__} decides"
    return [f"{order}: {'; '.join(clauses)}"] if clauses else []
