"""docs/matrix.md says what runs refuse."""

from pathlib import Path

import pytest
import ready_matrix
from known_flags import known

from llava_ds.extensions.table import EXTENSIONS

PAGE = Path(__file__).parents[3] / "docs" / "matrix.md"


@pytest.mark.long
@pytest.mark.skipif(
    not (all(map(known, ready_matrix.COLUMNS.values())) and {"preference", "rl", "embed", "gguf"} <= EXTENSIONS.keys()),
    reason="an extension that the page has a column for is not here",
)
def test_the_page_says_what_runs_refuse(tmp_path):
    cells = ready_matrix.refusals(tmp_path)
    assert PAGE.read_text(encoding="utf-8") == ready_matrix.page(cells), "run make docs"
    ticked = [not any(of_row.values()) for of_row in cells.values()]
    assert ticked[0]
