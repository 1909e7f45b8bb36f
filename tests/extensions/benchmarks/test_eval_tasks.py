"""--eval_tasks: the file that lists benchmarks, and what is wrong with one."""

import copy
import json

import pytest
import toys
import yaml

from llava_ds.constants import ConfigError, DataError
from llava_ds.data.encode import Encoder
from llava_ds.extensions.benchmarks.eval_tasks import read_eval_tasks, refuse_without_rows
from llava_ds.tokenizer import note_rows


@pytest.fixture
def data(tmp_path) -> dict[str, str]:
    return toys.write_data(tmp_path / "data", "itit")


def write(tmp_path, content: object) -> str:
    path = tmp_path / "tasks.yaml"
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content, sort_keys=False))
    return str(path)


def test_a_file_lists_several(tmp_path, data):
    (tmp_path / "rewards.py").write_text("def long(completions, **more):\n    return [1.0] * len(completions)\n")
    path = write(tmp_path, {
        "mine": {**data, "metric": "exact", "limit": 3, "max_new_tokens": 5},
        "turns.v2": {**data, "turns": "each"},
        "own": {**data, "metric": f"{tmp_path / 'rewards.py'}:long"},
    })  # fmt: skip
    tasks = read_eval_tasks(path, str(tmp_path / "cache"))
    assert [(task.name, len(task.questions), task.max_new_tokens) for task in tasks][:2] == [
        ("mine", 3, 5),
        ("turns.v2", len(tasks[1].questions), 64),
    ]
    assert len(tasks[1].questions) >= 4  # one record has several turns at most
    questions = tasks[0].questions
    assert tasks[0].score(questions, ["no answer"] * 3).columns.tolist() == [[0.0]] * 3
    assert tasks[2].score(tasks[2].questions, ["a"] * len(tasks[2].questions)).columns.mean() == 1


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("- a\n- b\n", r"tasks.yaml: it: Input should be a valid dictionary"),
        ("{", "can't be read"),
        ("{}", "lists no tasks"),
        ({"a": {"task": "llava"}}, r"a\.data_path: Field required"),
        ({"a": {"data_path": 3}}, r"a\.data_path: Input should be a valid string"),
        ({"a": {"data_path": "x", "limit": 0}}, r"a\.limit: Input should be greater than or equal to 1"),
        ({"a": {"data_path": "x", "metrics": "exact"}}, r"a\.metrics is unknown: annotations, data_path, .* are known"),
        ({"loss": {"data_path": "x"}}, "loss can't name a score"),
        ({"my_loss": {"data_path": "x"}}, "my_loss can't name a score"),
        ({"a b": {"data_path": "x"}}, "a b can't name a score"),
        ({"eval_a": {"data_path": "x"}}, "eval_a can't name a score"),
        ({"a": {"data_path": "x", "task": "pope", "metric": "exact"}}, "a: metric has no effect on task pope"),
        ({"a": {"data_path": "x", "task": "scienceqa", "turns": "each"}}, "a: turns has no effect on task scienceqa"),
        ({"a": {"data_path": "x", "task": "pope", "split": "val"}}, "a: split has no effect on task pope"),
        ({"a": {"data_path": "x", "task": "mmvet"}}, "task mmvet is unknown: give one of ai2d, caption, chartqa"),
        ({"a": {"data_path": "x", "task": "preference"}}, "task preference is unknown"),
        ({"a": {"data_path": "x", "metric": "bleu"}}, "metric bleu is unknown: give one of exact, vqa"),
        ({"a": {"data_path": "x", "turns": "last"}}, "turns is last, expected together or each"),
        ({"a": {"data_path": "/nowhere.json"}}, r"tasks.yaml: a: .*nowhere"),
        ({"a": {"data_path": "x", "metric": "/nowhere.py:f"}}, r"tasks.yaml: a: "),
    ],
)
def test_what_is_wrong_is_said_with_the_task(tmp_path, content, said):
    with pytest.raises((ConfigError, DataError), match=said):
        read_eval_tasks(write(tmp_path, content), str(tmp_path / "cache"))


def test_a_missing_file(tmp_path):
    with pytest.raises(ConfigError, match=r"--eval_tasks .*tasks.yaml can't be read .* give a YAML file of"):
        read_eval_tasks(str(tmp_path / "tasks.yaml"), str(tmp_path))


def test_a_file_without_questions(tmp_path):
    (tmp_path / "none.json").write_text(json.dumps([]))
    with pytest.raises(DataError, match="a: "):
        read_eval_tasks(write(tmp_path, {"a": {"data_path": str(tmp_path / "none.json")}}), str(tmp_path / "cache"))


def test_a_question_with_a_token_without_a_row_is_refused_before_training(tmp_path, data, tokenizer):
    tasks = read_eval_tasks(write(tmp_path, {"mine": data}), str(tmp_path / "cache"))
    taught = copy.deepcopy(tokenizer)
    taught.add_tokens(["number"])  # every question of the toy data has it
    for rows, fits in ((len(tokenizer) + 1, True), (len(tokenizer), False)):
        note_rows(taught, rows)
        encoder = Encoder(taught, toys.encoding_options())
        if fits:
            refuse_without_rows(tasks, encoder)
            continue
        with pytest.raises(DataError, match=r"--eval_tasks, mine: question \S+: the text spells the token 'number'"):
            refuse_without_rows(tasks, encoder)
