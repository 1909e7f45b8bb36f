"""Flags that the chosen way of a command does not read are refused, not passed over."""

import importlib.util
import sys

import pytest
from launching import ROOT

from llava_ds.constants import ConfigError

GENERATED = (
    "goes with --data_path: the generated questions have their own images and answers, give that, or leave it out"
)


def script(name: str):
    spec = importlib.util.spec_from_file_location(f"run_{name}", ROOT / "run" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def evaluate():
    return script("evaluate")


def refusal(monkeypatch, read, *words: str) -> str:
    monkeypatch.setattr(sys, "argv", ["x", *words])
    with pytest.raises(ConfigError) as caught:
        read(sys.argv[1:])
    return str(caught.value)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--image_folder", "nowhere"], f"--image_folder nowhere {GENERATED}"),
        (["--image_folder", "."], f"--image_folder . {GENERATED}"),
        (["--annotations", "a.json"], f"--annotations a.json {GENERATED}"),
        (["--data_path", "d.json", "--image_folder", "nowhere"], "--image_folder nowhere: the folder does not exist"),
        (
            ["--task", "mmbench", "--data_path", "d.tsv", "--image_folder", "nowhere"],
            "--image_folder nowhere: the folder does not exist",
        ),
        *(
            (
                ["--task", task, "--data_path", "d.json", "--annotations", "a.json"],
                f"--annotations a.json: --task {task} reads the answers in --data_path: leave it out",
            )
            for task in ("llava", "caption", "preference")
        ),
        (
            ["--task", "preference", "--data_path", "d.json", "--max_new_tokens", "9"],
            "--max_new_tokens limits generation, but --task preference generates nothing: leave it out",
        ),
    ],
)
def test_evaluation_refuses_what_its_questions_do_not_use(evaluate, monkeypatch, words, message):
    assert refusal(monkeypatch, evaluate.parse, "--model_path", "m", *words) == message


def test_what_is_read_is_taken(evaluate, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["x", "--model_path", "m", "--data_path", "d.json", "--image_folder", "."])
    assert evaluate.parse(sys.argv[1:]).max_new_tokens == 64


def test_a_port_needs_a_server(monkeypatch):
    chat = script("chat")
    monkeypatch.setattr(sys, "argv", ["x", "--model_path", "m", "--port", "8000"])
    with pytest.raises(ConfigError, match="--port needs --web or --serve: give one of these, or leave it out"):
        chat.parse(sys.argv[1:])


def test_samples_of_a_page_need_the_page():
    with pytest.raises(ConfigError, match="--html_samples goes with --html: give that, or leave it out"):
        script("inspect_data").main(["--html_samples", "3"])
