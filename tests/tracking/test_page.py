"""report.html and compare.html: whole in themselves, true to the files, and made of whatever lies there."""

import html.parser
import itertools
import json
import math
import re

import pytest
from browser import Browser, missing
from extension_there import needs_extension
from PIL import Image

from llava_ds.extensions.table import EXTENSIONS
from llava_ds.tracking.chart import Series, line_chart
from llava_ds.tracking.compare_runs import comparison_page, differences, in_terminal, names_of
from llava_ds.tracking.data_page import ShownSample, runs_of
from llava_ds.tracking.data_page import page as data_page
from llava_ds.tracking.page import report_at_end, write_report
from llava_ds.tracking.run_files import read_run
from llava_ds.tracking.run_record import length_histogram
from llava_ds.tracking.series import known_numbers
from llava_ds.tracking.wording import duration, num_bytes

EVIL = "<script>alert(1)</script><img src=https://evil.example/x.png onerror=alert(2)>"
EVALUATION = {
    "metric": "exact match",
    "scores": {EVIL: {"colour": [3.0, 4], "overall": [5.0, 8]}},
    "metrics": {EVIL: {"overall": {"exact match": {"value": 0.625, "low": 0.25, "high": 0.875}}}},
}


def write_jsonl(path, rows) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_run(folder, steps: int = 30, more: dict[str, float] | None = None, **flags: object):
    """A run's folder with all that a report can show, hostile texts among it. more: of every row of the log."""
    more = more or {}
    folder.mkdir(parents=True)
    record = {
        "command": ["run/train.py", "--local_rank=0", "--data_path", "my data.json"],
        "folder": "/w",
        "arguments": {"model_name_or_path": "/m/vicuna", "data_path": f"/d/{EVIL}", "learning_rate": 1e-3, **flags},
        "given": ["learning_rate"],
        "num_steps": 30,
        "started": "2026-01-01 10:00:00 +0000",
        "world_size": 2,
        "device": "cpu",
        "versions": {"torch": "2.13"},
        "git_revision": "abc",
        "ds_config_reasons": {"train_batch_size": "--train_batch_size"},
        "data": {"summary": ["7 records", EVIL], "lengths": {"edges": [0, 5, 10], "counts": [3, 4]},
                 "held_out": ["1 sample of --eval_data_path x"]},
    }  # fmt: skip
    (folder / "run.json").write_text(json.dumps(record))
    (folder / "ds_config.json").write_text(json.dumps({"train_batch_size": 8, "zero_optimization": {"stage": 2}}))
    write_jsonl(
        folder / "metrics.jsonl",
        (
            {
                "step": n, "epoch": n / 30, "loss": math.nan if n == 7 else 3 / n, "lr": [1e-3 / n, 1e-4 / n],
                "grad_norm": None if n == 7 else 1.0, "samples": 8, "tokens": 1000, "supervised_tokens": 100,
                "step_time_s": 0.5, "data_wait_s": 0.05, "tokens_per_s": 2000.0, "mfu": 0.4,
                "peak_memory_bytes": 5 * 10**9, "skipped_steps": int(n >= 7), "broken_samples": int(n == 9), **more,
            }
            for n in range(1, steps + 1)
        ),
    )  # fmt: skip
    write_jsonl(folder / "evals.jsonl", [{"step": n, "loss": 4 / n, "broken_samples": 3} for n in (10, 20)])
    Image.new("RGB", (900, 600), "red").save(folder / "a.png")
    write_jsonl(
        folder / "samples.jsonl",
        [
            {"step": n, "id": name, "question": EVIL, "images": [picture], "reference": "red", "answer": answer}
            for name, picture in (("a", "a.png"), ("b", "none.png"))
            for n, answer in ((0, EVIL), (10, "red"), (20, "red"))
        ],
    )
    answers = [{"text": f"{EVIL}{n}", "reward": 1 - n / 10, "times": 3 - n // 4} for n in range(8)]
    write_jsonl(
        folder / "rollouts.jsonl",
        [
            {"step": n, "id": "a", "prompt": EVIL, "images": ["a.png"], "reference": "red", "answers": answers}
            for n in range(1, 31)
        ],
    )
    write_jsonl(folder / "skipped.jsonl", [{"file": "f.json", "line": 3, "index": 2, "id": EVIL, "reason": EVIL}])
    write_jsonl(folder / "skipped_steps.jsonl", [{"step": 7, "not_finite": "loss", "ranks": [0], "samples": [EVIL]}])
    (folder / "evaluation.json").write_text(json.dumps(EVALUATION))
    for step, whole in ((10, True), (20, False)):
        (folder / f"checkpoint-{step}").mkdir()
        (folder / f"checkpoint-{step}" / ("manifest.json" if whole else "x")).write_text("x" * 2000)
    return folder


class Elements(html.parser.HTMLParser):
    """Every tag with its attributes, and the text between them."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags, self.text, self.open = [], "", []
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in ("meta", "link", "img"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def refers_outside(elements: Elements) -> list[str]:
    found = [
        str(value)
        for tag, attributes in elements.tags
        for name, value in attributes.items()
        if name in ("src", "href", "action", "data", "srcset", "poster") or name.startswith("on")
    ]
    return [address for address in found if not address.startswith(("data:", "#"))]


def test_the_page_shows_all_of_a_run_and_nothing_of_it_as_html(tmp_path):
    page = write_report(write_run(tmp_path / "run", run_name=EVIL)).read_text()
    elements = Elements(page)
    assert not elements.open and not refers_outside(elements)
    assert not [tag for tag, _ in elements.tags if tag in ("script", "iframe", "object", "embed", "form")]
    images = ("samples" in EXTENSIONS) + 8 * ("rl" in EXTENSIONS)  # of one question, and of eight steps' answers
    assert sum(tag == "img" for tag, _ in elements.tags) == images and "url(" not in page and "@import" not in page
    for part in (
        "finished", "2 × cpu", "30,000", "40.0%", "10.0%", "5 GB",  # numbers
        "Loss per supervised token", "eval loss, last", "Learning rate", "Gradient norm", "Throughput", "Peak memory",
        "gaps: 1", *(("steps 10 to 20", "none.png") if "samples" in EXTENSIONS else ()),
        "exact match", "0.625 (5 of 8)", "0.625 [0.250, 0.875]",
        "7 records", "Samples by length",
        "Records left out: 1",
        "not finite: 1", "--learning_rate", "given", "--train_batch_size", '"stage": 2', "checkpoint-10",
        "no manifest", "cd /w\ndeepspeed --num_accelerators 2 run/train.py \\\n  --data_path 'my data.json'",
        "2.13", "abc",
        "1 sample of --eval_data_path", "broke in the last evaluation: 3",
    ):  # fmt: skip
        assert part in elements.text, part
    assert elements.text.count(EVIL) >= 8  # as text, wherever it came from


def test_what_is_held_out_is_not_said_to_be_trained_on(tmp_path):
    folder = write_run(tmp_path / "run")
    (folder / "skipped.jsonl").write_text("")
    record = json.loads((folder / "run.json").read_text())
    record["data"]["held_out"] = ["4 samples of --data_path; they are not trained on"]
    (folder / "run.json").write_text(json.dumps(record))
    text = Elements(write_report(folder).read_text()).text
    assert "they are not trained on" in text and "No record was rejected." in text
    assert "Every record was trained on" not in text


def places(page: str, *parts: str) -> list[int]:
    """Where each of them stands first in the page's body."""
    body = page[page.index("<body>") :]
    return [body.index(part) for part in parts]


def test_the_page_leads_with_the_result_and_ends_with_the_machine(tmp_path):
    folder = write_run(tmp_path / "run")
    scores = {"with image": {"colour": [3.0, 4], "overall": [6.0, 8]}, "without image": {"overall": [2.0, 8]}}
    overall = {"overall": {"accuracy": {"value": 0.75, "low": 0.5, "high": 1.0}}}
    (folder / "evaluation-other.json").write_text(json.dumps({"metric": "f1", "scores": {"x": {"overall": [8.0, 8]}}}))
    content = {"metric": "accuracy", "scores": scores, "metrics": {"with image": overall}}
    (folder / "evaluation.json").write_text(json.dumps(content))
    page = write_report(folder).read_text()
    ordered = places(
        page, "<b>0.750</b><span>accuracy with image</span><small>8 questions, 95 % interval 0.500 to 1.000</small>",
        "<b>0.250</b><span>without image</span>", 'style="width:75.0%"', "loss at the end",
        *(('<div class="sample">',) if "samples" in EXTENSIONS else ()), "Loss per supervised token", "Gradient norm",
        "<h2>Evaluation</h2>", "<h2>Data</h2>", "<h2>The machine</h2>",
        "tokens/s (median)", "waiting for data", "Throughput", "Seconds per step", "<h2>Configuration</h2>",
    )  # fmt: skip
    assert ordered == sorted(ordered)
    if "samples" in EXTENSIONS:
        text = Elements(page).text
        assert "Earlier answers (1)" in text and "step 0" in text


@pytest.mark.parametrize(
    "scores", [None, {}, {"a": 3}, {"a": {}}, {"a": {"overall": [1, 0]}}, {"a": {"overall": ["1", 2]}}]
)
def test_without_scores_the_page_says_how_to_get_them(tmp_path, scores):
    folder = write_run(tmp_path / "run")
    (folder / "evaluation.json").write_text(json.dumps({"scores": scores}))
    elements = Elements(write_report(folder).read_text())
    assert f"run/evaluate.py --model_path {folder} --compare_without_image" in elements.text and not elements.open
    folder = write_run(tmp_path / "stage-1", tune_mm_mlp_adapter=True)
    (folder / "evaluation.json").unlink()
    text = Elements(write_report(folder).read_text()).text
    assert "Stage 1 trains only a projector" in text and "run/evaluate.py" not in text


def test_a_logarithmic_axis_is_marked_as_such():
    def chart(*values: float) -> str:
        return line_chart("Loss", [Series("each step", range(len(values)), values)])

    assert "log scale" in Elements(chart(3, 1, 0.1)).text and "log scale" in chart(3, 1, 0.1).split("aria-label")[1]
    assert "log scale" not in chart(3, 2, 1) and "each step" in Elements(chart(3, 2, 1)).text


@needs_extension("rl")
def test_answers_that_were_rewarded(tmp_path):
    text = Elements(write_report(write_run(tmp_path / "run")).read_text()).text
    begin = text.rindex("Rewarded answers")
    part = text[begin : text.index("Learning", begin)]
    assert "step 1" in part and "step 30" in part and "22 more are in rollouts.jsonl" in part
    assert "1.00 × 3" in part and "0.30 × 2" in part and "More answers (2)" in part


@needs_extension("rl")
def test_what_an_objective_logs_has_charts_of_its_own(tmp_path):
    numbers = {"reward": 0.5, "objective/kl": 0.1, "experts/max_over_mean": 1.5, "val/mean": 1.0}
    page = write_report(write_run(tmp_path / "run", more=numbers)).read_text()
    text = Elements(page).text
    assert "Reward of answers" in text and "Distance from the reference model (KL), per answer" in text
    assert ("Tokens of the busiest expert" in text) == ("mixtures" in EXTENSIONS) and "val/mean" not in text
    several = write_report(write_run(tmp_path / "two", more={"rewards/exact/mean": 0.5, "rewards/iou/mean": 0.2}))
    assert "Reward: exact" in several.read_text() and "Reward: iou" in several.read_text()
    plain = Elements(write_report(write_run(tmp_path / "plain")).read_text()).text
    assert not any(title in plain for title in (*(number.title for number in known_numbers().values()), "Objective"))


def test_a_run_that_was_killed_says_how_far_it_came(tmp_path):
    page = write_report(write_run(tmp_path / "run", steps=12)).read_text()
    assert "at step 12 of 30" in page and "finished" not in Elements(page).text


@pytest.mark.parametrize(
    "name", ["run.json", "ds_config.json", "metrics.jsonl", "evals.jsonl", "samples.jsonl", "rollouts.jsonl",
             "skipped.jsonl", "skipped_steps.jsonl", "evaluation.json"],
)  # fmt: skip
def test_a_file_that_is_missing_or_broken_costs_its_own_part_only(tmp_path, name):
    folder = write_run(tmp_path / "run")
    (folder / name).unlink()
    for content in (None, b"", b"\xff\xfe\x00", b"[]\n", b'{"a": 1', b"[" * 10**5):
        if content is not None:
            (folder / name).write_bytes(content)
        elements = Elements(write_report(folder).read_text())
        assert not elements.open
        assert "checkpoint-10" in elements.text  # what follows is there
        if name in ("run.json", "ds_config.json", "metrics.jsonl"):
            said = rf"{re.escape(name)} (can't be read|in this folder|holds no|has no steps)"
            assert re.search(said, elements.text), (content, elements.text)


def test_fields_of_another_type_than_expected_cost_nothing_else(tmp_path):
    folder = write_run(tmp_path / "run")
    record = json.loads((folder / "run.json").read_text())
    for changed in (
        {"data": 3}, {"data": {"summary": 1, "lengths": {"edges": [0], "counts": [1]}}}, {"arguments": [1]},
        {"versions": 5}, {"num_steps": "many"}, {"given": None}, {"ds_config_reasons": []}, {"command": "x"},
    ):  # fmt: skip
        (folder / "run.json").write_text(json.dumps({**record, **changed}))
        assert "checkpoint-10" in Elements(write_report(folder).read_text()).text
    write_jsonl(folder / "samples.jsonl", [{"step": 1}, {"step": 2, "images": "x", "answer": 3, "reference": None}])
    answers = [3, {"text": 1, "reward": "much", "times": None}]
    write_jsonl(folder / "rollouts.jsonl", [{"step": 1}, {"step": 2, "images": "x", "answers": answers, "prompt": 3}])
    write_jsonl(
        folder / "metrics.jsonl", [{"step": 1, "loss": "x", "lr": "y"}, {"step": 2, "lr": []}, {"step": 3, "loss": 1}]
    )
    assert "checkpoint-10" in Elements(write_report(folder).read_text()).text


def test_a_run_is_not_lost_over_its_report(tmp_path, capsys):
    report_at_end(tmp_path / "there_is_no_folder")
    said = capsys.readouterr().out
    assert "WARNING" in said and "run/report.py" in said


def test_runs_are_compared_by_what_differs_and_what_came_of_it(tmp_path):
    one = write_run(tmp_path / "one", seed=1, output_dir="x")
    other = write_run(tmp_path / "other", steps=20, seed=2, output_dir="y")
    (other / "ds_config.json").write_text(json.dumps({"train_batch_size": 8, "zero_optimization": {"stage": 3}}))
    runs = [read_run(one), read_run(other)]
    assert differences(runs) == [["--seed", "1", "2"], ["ds_config: zero_optimization.stage", "2", "3"]]
    lines = in_terminal(runs)
    assert any(re.fullmatch(r"optimizer steps +30 +20", line) for line in lines)
    assert any(re.fullmatch(r"--seed +1 +2", line) for line in lines)
    assert any("overall" in line and line.count("0.625") == 2 for line in lines)
    elements = Elements(comparison_page(runs))
    assert not elements.open and not refers_outside(elements) and "Eval loss" in elements.text
    assert sum(tag == "svg" for tag, _ in elements.tags) == 5


def test_runs_of_one_name_are_told_apart(tmp_path):
    runs = [read_run(write_run(tmp_path / name / "run")) for name in ("a", "b")]
    names = names_of([*runs, runs[0]])
    assert len(set(names)) == 3 and all(name.startswith("run") for name in names)


def test_the_histogram_counts_every_sample_once():
    lengths = [1, 5, 40, 41, 400, 2047, 2048]
    found = length_histogram(lengths)
    assert sum(found["counts"]) == len(lengths) and len(found["edges"]) == len(found["counts"]) + 1
    assert found["edges"][0] == 0 and found["edges"][-1] >= 2048 and len(found["counts"]) <= 40
    assert length_histogram([7, 7]) == {"edges": list(range(8)), "counts": [0] * 6 + [2]}


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.5, "0.5 s"), (59, "59 s"), (200, "3 min 20 s"), (3600, "1 h"), (18_420, "5 h 7 min"), (273_600, "3 d 4 h")],
)
def test_durations_are_two_units_at_most(seconds, words):
    assert duration(seconds) == words


def test_sizes_are_decimal():
    assert [num_bytes(n) for n in (12, 1500, 6.42e10)] == ["12 bytes", "1.5 kB", "64.2 GB"]


def write_pages(folder, tokenizer) -> dict[str, int]:
    """Every kind of page, with long words and numbers of every size in it: their names, and the images of each."""
    write_run(folder / "run", run_name=EVIL)
    write_report(folder / "run")
    plain = write_run(folder / "a-run-with-a-long-name-and-no-break", num_train_epochs=3)
    kinds = {"colour": [3.0, 4], "a-kind-of-question-with-a-long-name": [1.0, 3], "overall": [5.0, 8]}
    scores = {name: kinds for name in ("with image", "without image", "blank image")}
    (plain / "evaluation.json").write_text(json.dumps({"metric": "accuracy", "scores": scores}))
    write_jsonl(plain / "metrics.jsonl", [
        {"step": n, "loss": 12345.6 / n**2, "lr": [1e-7 * n], "tokens_per_s": 1e6 * n, "step_time_s": 1e-3 * n,
         "data_wait_s": 0, "peak_memory_bytes": 6e10, "grad_norm": 1e-3 * n} for n in range(1, 99_999, 777)
    ])  # fmt: skip
    write_report(plain)
    (plain / "evaluation.json").unlink()
    write_report(plain, folder / "not-evaluated.html")
    runs = [read_run(folder / "run"), read_run(plain)]
    (folder / "compare.html").write_text(comparison_page(runs))
    (folder / "compare-many.html").write_text(comparison_page([*runs, *runs]))
    ids = tokenizer("USER: What is it?" + 9 * " very" + " long" * 200, add_special_tokens=False)["input_ids"]
    images = (Image.new("RGB", (500, 20), "red"), Image.new("RGB", (64, 900), "blue"), Image.new("RGB", (9, 9)))
    shown = ShownSample("an-id-of-" + "x" * 90, "n", runs_of(ids, ids, tokenizer), images)
    rejected = [{"file": "f" * 90, "line": 2, "index": 1, "id": "i" * 90, "reason": "no " * 50}]
    (folder / "data.html").write_text(data_page("d" * 90 + "/data.json", ["1 record", "y" * 200], [shown], rejected))
    return {"run/report.html": 9, f"{plain.name}/report.html": 9, "not-evaluated.html": 9, "compare.html": 0,
            "compare-many.html": 0, "data.html": 3}  # fmt: skip


@pytest.mark.long
@pytest.mark.skipif(missing() is not None, reason=str(missing()))
def test_in_a_browser_nothing_is_asked_for_and_all_of_it_fits(tmp_path, tokenizer):
    pages = write_pages(tmp_path, tokenizer)
    with Browser(tmp_path / "profile") as tab:
        for (name, images), width in itertools.product(pages.items(), (400, 800, 1400)):
            page = tmp_path / name
            tab.open(page, width)
            assert [address for address in tab.requests if not address.startswith("data:")] == [page.as_uri()]
            assert tab.errors == []
            assert tab.broken_images() == []
            assert tab.count("img") == images
            assert tab.ask("document.documentElement.scrollWidth") <= width, (name, width)
            assert tab.cut_texts() == [], (name, width)
            smallest = (
                "Math.min(99, ...[...document.querySelectorAll('svg text')].map(t => t.getBoundingClientRect().height))"
            )
            assert tab.ask(smallest) >= 10  # pixels


@pytest.mark.long
@pytest.mark.skipif(missing() is not None, reason=str(missing()))
def test_the_browser_finds_texts_that_are_cut(tmp_path):
    svg = '<svg viewBox="0 0 300 20" width="300"><text x="280" y="15">{}</text><text x="0" y="15">b</text>{}</svg>'
    pages = {
        "whole": "<p>one two</p>" + svg.format("a", ""),
        "outside": "<p style='width:900px'>" + "word " * 60,
        "clipped: ": "<div style='overflow:hidden;width:50px'>" + "w" * 20 + "</div>",
        "clipped: sticks": svg.format("sticks out", ""),
        "on each other": svg.format("a", '<text x="2" y="15">cc</text>'),
    }
    with Browser(tmp_path / "profile") as tab:
        for found, body in pages.items():
            (tmp_path / "page.html").write_text(f"<!doctype html><body style='margin:0'>{body}")
            tab.open(tmp_path / "page.html", 420)
            cut = tab.cut_texts()
            assert (not cut) if found == "whole" else cut and cut[0].startswith(found), (found, cut)
