"""Code and pages are written as an engineer speaks: habits that make sentences hard to read may only become fewer."""

from pathlib import Path

import pytest
from prose import HABITS, habits_in, texts_of_code, texts_of_page

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "ds_configs").glob("*.md"))]
GENERATED = {"flags.md"}

# Habits per 1,000 words. A rate below its bar by more than SLACK fails, too: lower the bar, so that it can't rise again
# unseen.
BARS = {"code": 2.0, "pages": 1.5}
SLACK = 0.2
MOST_WORDS = 40_000  # of all pages in docs/ that are not generated


def texts(where: str) -> list[str]:
    if where == "pages":
        return [text for page in PAGES if page.name not in GENERATED for text in texts_of_page(page.read_text())]
    sources = [path for folder in ("llava_ds", "run") for path in sorted((ROOT / folder).rglob("*.py"))]
    return [text for path in sources for text in texts_of_code(path.read_text(encoding="utf-8"))]


@pytest.mark.parametrize("where", BARS)
def test_hard_sentences_only_become_fewer(where):
    found, words = habits_in(texts(where))
    rate = round(1000 * found.total() / words, 1)
    assert rate <= BARS[where], found.most_common()
    assert rate >= round(BARS[where] - SLACK, 1), f"lower the bar of {where} to {rate}"


def test_the_pages_stay_short():
    pages = [page for page in (ROOT / "docs").glob("*.md") if page.name not in GENERATED]
    assert sum(len(page.read_text().split()) for page in pages) <= MOST_WORDS


EXAMPLES = {
    "a sentence that begins with Of": "Of a stage before the last, the states.",
    "a text that begins with of": "of each rank's samples",
    "that of, those which": "the loss is that of one rank",
    "of each, of it at the end": "the sizes of each.",
    "what as a noun": "Return what the next one takes.",
    "as they are": "tensors as they are on disk",
    "go on": "the run goes on",
    "things that tell or ask": "the flag tells the reader",
    "things that lie or stand": "the file lies in the folder",
    "there is none": "where there is none",
    "is no such thing": "a folder is no file",
    "inversion": "nor does the next",
    "behind, beside": "the folder beside it",
    "in the place of": "written in its place",
    "too at the end": "on CPUs, too",
    "which after a comma": "the rank, which waits",
    "three times of": "the name of the file of the rank of a run",
    "all but": "all but the last",
    "shall": "it shall stop",
    "picture in place of image": "one picture",
}


@pytest.mark.parametrize("habit", HABITS)
def test_each_habit_is_found_where_it_is(habit):
    found, words = habits_in([EXAMPLES[habit]])
    assert found[habit] == 1 and words == len(EXAMPLES[habit].split())
    assert not habits_in(["Map this rank's parameter names to the unsharded model's.\nRaises DataError."])[0].total()


def test_texts_are_docstrings_messages_comments_and_lines_of_pages():
    source = (
        '"""A module."""\nname = "short key"  # a comment\n# that continues\nraise E(f"one two {name} four five")\n'
    )
    assert list(texts_of_code(source)) == ["A module.", "one two X four five", "a comment that continues"]
    page = "# Title\n\nA `code` line\n\n    a command\n\n```bash\na command\n```\n"
    assert list(texts_of_page(page)) == ["# Title", "A X line"]
