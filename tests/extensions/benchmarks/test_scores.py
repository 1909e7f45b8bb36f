"""Scores equal those of the official code, on 500 answers each, and on published examples."""

import gzip
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from launching import ROOT

from llava_ds.boxes import THOUSANDTHS, BoxFormat
from llava_ds.constants import ConfigError, DataError
from llava_ds.extensions.benchmarks.answer_rules import BOX_UNITS, mmmu_letter, named_box
from llava_ds.extensions.benchmarks.benchmarks import BENCHMARKS
from llava_ds.extensions.benchmarks.captions import caption_words
from llava_ds.extensions.benchmarks.normalise import evalai_answer, vqa_answer
from llava_ds.extensions.benchmarks.option_letters import matched_letter, named_letter, says_yes
from llava_ds.extensions.benchmarks.question import Question, with_resized_sizes
from llava_ds.extensions.benchmarks.score_table import as_json, estimates
from llava_ds.extensions.benchmarks.scores import METRICS, metric_of, reference_for
from llava_ds.extensions.infer.generate import Prompt

GOLDENS = Path(__file__).parent / "goldens"


def golden(name: str) -> list[dict]:
    with gzip.open(GOLDENS / f"{name}.jsonl.gz", "rt", encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    assert len(rows) == 500
    return rows


def asked(references: list) -> list[Question]:
    return [Question(i, Prompt((), ()), "", reference) for i, reference in enumerate(references)]


def scored(metric: str, answers: list[str], references: list):
    return METRICS[metric](asked(references), answers)


def figures(result) -> dict[str, float]:
    return {name: float(figure(result.columns.mean(axis=0))) for name, figure in result.metrics.items()}


def of_kinds(result, kinds: list[tuple[str, ...]]) -> dict[str, dict[str, float]]:
    """The figures of each kind, and of all questions."""
    found = estimates(replace(result, kinds=kinds), 1, 0)
    return {kind: {name: each.value for name, each in metrics.items()} for kind, metrics in found.items()}


@pytest.mark.parametrize(("name", "metric"), [("vqav2", "vqa"), ("textvqa", "textvqa")])
def test_vqa_accuracies_are_the_official_ones(name, metric):
    rows = golden(name)
    result = scored(metric, [row["answer"] for row in rows], [row["references"] for row in rows])
    np.testing.assert_allclose(result.columns[:, 0], [row["expected"] for row in rows], atol=1e-9)
    assert 0.2 < result.columns.mean() < 0.9  # neither all wrong nor all right


def test_popes_figures_are_the_official_ones():
    rows = golden("pope")
    result = scored("yes_no", [row["answer"] for row in rows], [row["label"] for row in rows])
    assert [says_yes(row["answer"]) for row in rows] == [row["expected"] == "yes" for row in rows]
    assert figures(result) == pytest.approx(rows[0]["figures"], abs=1e-12)
    splits = ("adversarial", "popular", "random")
    found = of_kinds(result, [(splits[i % 3],) for i in range(len(rows))])
    for split in splits:
        assert found[split] == pytest.approx(rows[0]["figures_by_split"][split], abs=1e-12)


def test_scienceqas_options_are_the_official_ones():
    rows = golden("scienceqa")
    found = [named_letter(row["answer"], row["num_choices"]) for row in rows]
    assert [-1 if option is None else option for option in found] == [row["expected"] for row in rows]
    assert len(set(found)) == 6


def test_gqas_accuracy_is_the_official_one():
    rows = golden("gqa")
    result = scored("gqa", [row["answer"] for row in rows], [row["reference"] for row in rows])
    assert result.columns[:, 0].tolist() == [row["expected"] for row in rows]


def test_mmbenchs_options_and_circular_accuracy_are_the_official_ones():
    rows = golden("mmbench")
    rounds = [(q, each) for q, row in enumerate(rows) for each in row["rounds"]]
    assert [matched_letter(each["answer"], each["options"]) for _, each in rounds] == [r["expected"] for _, r in rounds]
    references = [[q, each["letter"], each["options"]] for q, each in rounds]
    result = scored("circular", [each["answer"] for _, each in rounds], references)
    assert result.columns[:, 0].tolist() == [row["expected"] for row in rows]
    assert figures(result)["first_round_accuracy"] > figures(result)["accuracy"]


def test_captions_scores_are_the_official_ones():
    rows = golden("captions")
    assert [" ".join(caption_words(row["answer"])) for row in rows] == [row["words"] for row in rows]
    result = scored("caption", [row["answer"] for row in rows], [row["references"] for row in rows])
    expected = [[row["cider"], row["rouge_l"]] for row in rows]
    np.testing.assert_allclose(result.columns, expected, rtol=1e-9, atol=1e-9)
    assert figures(result) == pytest.approx(rows[0]["figures"], rel=1e-9)


@pytest.mark.parametrize(
    ("name", "metric"),
    [
        ("anls", "anls"),
        ("relaxed", "relaxed"),
        ("ai2d", "letter_alone"),
        ("seed", "first_character"),
        ("mmstar", "leading_letter"),
    ],
)
def test_scores_of_single_answers_are_the_official_ones(name, metric):
    rows = golden(name)
    result = scored(metric, [row["answer"] for row in rows], [row["reference"] for row in rows])
    np.testing.assert_allclose(result.columns[:, 0], [row["expected"] for row in rows], atol=1e-12)
    assert 0.2 < result.columns.mean() < 0.9


def test_ocrbenchs_points_are_the_official_ones():
    rows = golden("ocrbench")
    references = [{"answer": row["reference"], "category": row["category"]} for row in rows]
    result = scored("ocrbench", [row["answer"] for row in rows], references)
    assert result.per_question.tolist() == [row["expected"] for row in rows]
    expected = rows[0]["figures"]
    sums = as_json({"": replace(result, kinds=[(row["category"],) for row in rows])}, 1, 0)["scores"][""]
    assert {kind: points for kind, (points, _) in sums.items() if kind != "overall"} == expected["points_by_category"]
    assert sums["overall"][0] == expected["sum"] and figures(result)["points"] == expected["sum"] * 1000 / 500


def test_mmmus_options_values_and_accuracies_are_the_official_ones():
    rows = golden("mmmu")
    references = [{"answer": row["reference"], "options": row["options"]} for row in rows]
    result = scored("mmmu", [row["answer"] for row in rows], references)
    chosen = [row for row in rows if row["options"]]
    assert [mmmu_letter(row["answer"], row["options"]) for row in chosen] == [row["named"] for row in chosen]
    assert result.columns[:, 0].tolist() == [row["expected"] for row in rows]
    assert result.columns[:, 1].tolist() == [row["named"] is None for row in rows]
    found = of_kinds(result, [tuple(BENCHMARKS["mmmu"].kinds(row)) for row in rows])
    assert {kind: each["accuracy"] for kind, each in found.items()} == pytest.approx(rows[0]["figures"], abs=1e-12)
    assert len(found) == 30 + 6 + 1


def test_mathvistas_verdicts_without_a_judge_are_the_official_ones():
    rows = golden("mathvista")
    references = [{**row, "answer": row["reference"]} for row in rows]
    result = scored("mathvista", [row["answer"] for row in rows], references)
    assert result.columns.tolist() == [[row["expected"], row["needs_judge"]] for row in rows]
    assert 0.2 < figures(result)["accuracy"] < 0.8 and 0.1 < figures(result)["needs_judge"] < 0.5


def test_mmes_sums_are_the_official_ones():
    rows = golden("mme")
    references = [{"answer": row["reference"], "pair": [row["category"], row["pair"]]} for row in rows]
    kinds = [tuple(BENCHMARKS["mme"].kinds(row)) for row in rows]
    questions = [replace(q, kinds=kind) for q, kind in zip(asked(references), kinds)]
    result = METRICS["mme"](questions, [row["answer"] for row in rows])
    assert result.per_question.tolist() == [row["expected"] for row in rows]
    found, expected = of_kinds(result, result.kinds), rows[0]["figures"]
    assert len(found) == 14 + 2 + 1
    for ability in ("perception", "cognition"):
        assert found["overall"][ability] == pytest.approx(expected[ability], rel=1e-12)
    for category, ability in set(kinds):
        assert found[category][ability] == pytest.approx(expected[category], rel=1e-12)


def test_boxes_in_pixels_of_the_resized_image_are_those_of_the_image():
    """As Qwen2.5-VL answers, whose sizes come from its processor's rule."""
    images = pytest.importorskip("llava_ds.extensions.ready.ready_images")
    tiling = images.CellTiling(28, 2, 56 * 56, 28 * 28 * 64, "<i>")
    options = images.ReadyImageOptions(28, 28, (0.5,) * 3, tiling=tiling, boxes=BoxFormat("real"))
    sizes = [(640, 480), (300, 500)]
    references = [{"answer": [0.25 * w, 0.5 * h, 0.75 * w, h], "size": [w, h]} for w, h in sizes]
    questions = with_resized_sizes(asked(references), options)
    assert [q.reference["resized"] for q in questions] == [(252, 168), (168, 280)]
    answers = ['```json\n[{"bbox_2d": [63, 84, 189, 168], "label": "cat 2"}]\n```', "(42,140),(126,280)"]
    found = figures(METRICS["grounding"](questions, answers))
    assert found["accuracy"] == found["accuracy_resized_pixels"] == 1 > found["accuracy_pixels"]
    assert found["mean_iou"] == pytest.approx(1)
    assert with_resized_sizes(questions, replace(options, boxes=THOUSANDTHS)) == questions
    assert with_resized_sizes(asked(["yes"]), options) == asked(["yes"])


def test_boxes_whose_y_comes_first():
    """As Gemma 4 answers: the same boxes of the golden answers in thousandths, written the other way."""
    rows = golden("refcoco")
    references = [{"answer": row["box"], "size": row["size"]} for row in rows]
    boxes = [named_box(row["answers"]["0_to_1000"]) for row in rows]
    answers = ["none" if box is None else f"[{box[1]}, {box[0]}, {box[3]}, {box[2]}]" for box in boxes]
    result = scored("grounding", answers, references)
    np.testing.assert_allclose(result.columns[:, 1], [row["expected"]["0_to_1000"] for row in rows], atol=1e-9)
    found = figures(result)
    assert found["accuracy"] == found["accuracy_0_to_1000_y_first"] > max(0.3, found["accuracy_0_to_1000"])


@pytest.mark.parametrize("unit", [unit for unit in BOX_UNITS if unit not in ("resized_pixels", "0_to_1000_y_first")])
def test_ious_of_boxes_are_the_official_ones_in_any_unit(unit):
    rows = golden("refcoco")
    references = [{"answer": row["box"], "size": row["size"]} for row in rows]
    result = scored("grounding", [row["answers"][unit] for row in rows], references)
    expected = np.array([row["expected"][unit] for row in rows])
    np.testing.assert_allclose(result.columns[:, 1], expected, atol=1e-9)
    assert result.columns[:, 0].tolist() == (expected >= 0.5).tolist()
    found = figures(result)
    assert found["accuracy"] == found[f"accuracy_{unit}"] > 0.3 and found["mean_iou"] == pytest.approx(expected.mean())


def test_published_examples():
    # The VQA paper's formula: three people who said so are enough, leaving one's own answer out.
    assert scored("vqa", ["yes"] * 3, [["yes"] * n + ["no"] * (10 - n) for n in (1, 3, 10)]).columns[
        :, 0
    ].tolist() == pytest.approx([0.3, 0.9, 1.0])
    # The evaluation page of VQA: lower case, periods but in decimals, numbers, articles, apostrophes, punctuation.
    assert vqa_answer("The Two dogs.") == "2 dogs"
    assert vqa_answer("dont") == "don't"
    assert vqa_answer("3.5") == "3.5"
    assert vqa_answer("1,000") == "1000"
    assert evalai_answer("The man's hat?") == "man 's hat"
    # POPE's README: an answer in a sentence.
    assert says_yes("Yes, there is a snowboard in the image.") and not says_yes("No, there is not.")
    # MMBench's paper, table on matching: choice labels and option contents.
    options = {"A": "teddy bear", "B": "rabbit", "C": "cat", "D": "dog"}
    assert matched_letter("a cute teddy bear", options) == "A"
    assert matched_letter("(C) cat", options) == "C"
    assert matched_letter("Spider", options) is None


def test_exact_match_forgives_case_space_and_full_stop_only():
    result = scored("exact", [" Yes. ", "yes, two", "no"], ["yes", "yes", "no."])
    assert result.columns[:, 0].tolist() == [1, 0, 1]


def test_nobody_says_yes():
    found = figures(scored("yes_no", ["no", "no"], ["no", "no"]))
    assert found == {"accuracy": 1, "precision": 0, "recall": 0, "f1": 0, "yes_ratio": 0}


def test_references_of_a_record_are_what_the_metric_compares_with():
    assert reference_for("exact", ["a cat"]) == "a cat"
    assert reference_for("yes_no", ["Yes, it is."]) == "yes"
    assert reference_for("choice", ["The answer is C."]) == [2, 5] == reference_for("choice", ["C."])
    assert reference_for("caption", ["a", "b"]) == ["a", "b"]
    for metric, texts, message in [
        ("yes_no", ["perhaps"], "expected yes or no"),
        ("choice", ["a cat"], "expected a letter"),
        ("vqa", ["a"], "needs 4 or more"),
        ("exact", ["a", "b"], "takes one"),
    ]:
        with pytest.raises(DataError, match=message):
            reference_for(metric, texts)


def test_a_function_of_ones_own_is_a_metric(tmp_path):
    (tmp_path / "mine.py").write_text(
        "def halves(prompts, completions, references, ids):\n"
        "    return [0.5 * (a == r) + 0.25 * (i == '1') for a, r, i in zip(completions, references, ids)]\n"
    )
    result = metric_of(f"{tmp_path / 'mine.py'}:halves")(asked(["a", "b", "c"]), ["a", "x", "c"])
    assert result.per_question.tolist() == [0.5, 0.25, 0.5] and list(result.metrics) == ["halves"]
    with pytest.raises(ConfigError, match=r"--metric .*mine.py:wholes: .* has no function wholes"):
        metric_of(f"{tmp_path / 'mine.py'}:wholes")


def test_facts_of_descriptions_are_scored_whatever_their_order():
    facts = metric_of(f"{ROOT / 'run' / 'recipes' / 'facts.py'}:facts")
    reference = "At the top left is a red cross and in the centre is a purple circle."
    answers = {
        "There is a purple circle in the centre and a red cross at the top left.": 1.0,
        "Two shapes: a red cross at the top left and a blue circle in the centre.": 0.5,
        "A red cross at the top left.": 2 / 3,
        "A red cross at the top left, a red cross at the top left and a red cross at the top left.": 0.4,
        "yes": 0.0,
    }
    result = facts(asked([reference] * len(answers)), list(answers))
    assert result.per_question.tolist() == pytest.approx(list(answers.values()))
