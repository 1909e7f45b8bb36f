"""Wrong answers are shown, the most confident first, with what was expected and what was to be seen."""

import json

import pytest
from PIL import Image

from llava_ds.extensions.benchmarks.answers import BLANK_IMAGE, WITHOUT_PICTURE
from llava_ds.tracking.blocks import show
from llava_ds.tracking.mistakes import mistake_lines, mistakes_part, most_confident, percent
from llava_ds.tracking.page import report_page
from llava_ds.tracking.result import CONDITIONS, condition_notes
from llava_ds.tracking.run_files import read_run

EVIL = "<script>alert(1)</script>"


def row(number: int, score: float, logprob: float, **more: object) -> dict[str, object]:
    return {
        "question_id": f"q{number}", "prompt": f"What is {number}?", "text": f"answer {number}", "kinds": ["k"],
        "reference": "right", "score": score, "logprob": logprob, "num_tokens": 2, "images": [], **more,
    }  # fmt: skip


ROWS = [row(0, 1.0, -0.01), row(1, 0.0, -2.0), row(2, 0.0, -0.1), row(3, 0.3, -0.5), row(4, 0.6, -0.02)]


def test_the_most_confident_mistakes_come_first():
    found, count = most_confident(ROWS, "accuracy", 2)
    assert [each["question_id"] for each in found] == ["q2", "q3"] and count == 3
    lowest, count = most_confident(ROWS, "cider", 3)
    assert [each["question_id"] for each in lowest] == ["q2", "q1", "q3"] and count == 5
    assert most_confident([{"text": "of an older version"}], "accuracy", 2) == ([], 0)


def test_the_terminal_says_what_was_answered_and_what_expected():
    lines = mistake_lines([row(1, 0.0, -0.1, images=["/d/1.png"], reference=["b", "a", "b"]), *ROWS], "accuracy", 1)
    assert lines[0] == "1 of 4 wrong answers, the most confident first:" and len(lines) == 3
    assert lines[1].split() == ["90.5", "%", '"answer', '1",', "expected", '"b', "/", 'a"']
    assert lines[2].strip() == "What is 1?  (id q1, k, /d/1.png)"
    assert mistake_lines(ROWS[:1], "accuracy", 3) == ["all answers are right"]
    assert mistake_lines(ROWS, "accuracy", 0) == ["3 wrong answers: --show_wrong 10 shows some"]
    assert mistake_lines(ROWS, "cider", 0) == []


@pytest.mark.parametrize("logprob, shown", [(0.0, ">99.9 %"), (-0.0513, "95.0 %"), (-9.0, "<0.1 %"), (1e-9, ">99.9 %")])
def test_a_probability_is_readable(logprob, shown):
    assert percent({"logprob": logprob}) == shown


def test_the_page_shows_them_with_their_images(tmp_path):
    Image.new("RGB", (60, 40), "red").save(tmp_path / "a.png")
    rows = [*ROWS, row(5, 0.0, -0.001, images=["a.png", "none.png"], prompt=EVIL, text=EVIL, turn=3)]
    assert mistakes_part(read_run(tmp_path)) == []
    (tmp_path / "evaluation.json").write_text(json.dumps({"metric": "accuracy", "turns": "together", "scores": {}}))
    assert mistakes_part(read_run(tmp_path)) == []
    (tmp_path / "evaluation.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    part = show(mistakes_part(read_run(tmp_path)))
    assert part.count('class="sample"') == 4 and part.count("<img src") == 1 and EVIL not in part
    assert part.index("&lt;script&gt;") < part.index("answer 2") < part.index("answer 3") < part.index("answer 1")
    assert "after 2 earlier turns with their true answers" in part and "The image can&#39;t be shown" in part
    assert "answer 4" not in part and "4 wrong answers" in part
    hostile = [{**ROWS[1], "logprob": -(10**400)}, {**ROWS[1], "kinds": 3}]
    for text in ("[1]\n{", "\xff", "[" * 10**5, *map(json.dumps, hostile)):
        (tmp_path / "evaluation.jsonl").write_text(text, encoding="latin-1")
        assert "evaluation.jsonl can&#39;t be read" in show(mistakes_part(read_run(tmp_path))), text[:99]


def test_a_table_says_what_its_conditions_mean(tmp_path):
    assert set(CONDITIONS) == {BLANK_IMAGE, WITHOUT_PICTURE}
    assert condition_notes({"with picture": {}}) == [] == condition_notes([1])
    scores = {name: {"overall": [1.0, 2]} for name in ("with picture", BLANK_IMAGE)}
    (tmp_path / "evaluation.json").write_text(json.dumps({"metric": "accuracy", "scores": scores}))
    page = report_page(read_run(tmp_path))
    assert "blank image: every image replaced by a plain colour" in page and "no image and no image mark" not in page
