"""JSON in flags that is too deep, twice or no number, and names that no file or library takes: one message each."""

import os

import pytest

from llava_ds.config.bounds import json_object
from llava_ds.config.parsing import parse_arguments
from llava_ds.constants import ConfigError, in_short
from llava_ds.engine.ds_config.scheduler import kwargs_problem
from llava_ds.files.model_files import check_folder
from llava_ds.files.writing import path_problem
from llava_ds.runtime.command import new_folder

PLAIN = ["--output_dir", "out", "--deepspeed_config", "zero2"]
DEEP, DEEPER = "[" * 100_000, '{"a":' * 100_000
NUMBER = "9" * 5000


def refusal(*flags: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_arguments([*PLAIN, *flags])
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (DEEP, "it is nested too deeply"),
        (DEEPER, "it is nested too deeply"),
        ('{"a": NaN}', "NaN is not a finite number"),
        ('{"a": -Infinity}', "-Infinity is not a finite number"),
        ('{"a": 1e999}', "1e999 is not a finite number"),
        (f'{{"a": {NUMBER}}}', "Exceeds the limit"),
        ('{"a": 1, "a": 2}', "a occurs twice"),
        ("[1]", "expected an object"),
        ("NaN", "NaN is not a finite number"),
    ],
)
def test_json_of_a_flag_is_an_object_of_finite_numbers(text, problem):
    with pytest.raises(ValueError, match=problem):
        json_object(text)
    args = parse_arguments([*PLAIN, "--lr_scheduler_kwargs", text])[0].training
    line = kwargs_problem(args)
    assert line.startswith(f"--lr_scheduler_kwargs {in_short(text)} can't be read as a JSON object ({problem}")
    assert len(line) < 400


def test_a_time_of_thousands_of_digits_is_no_time():
    assert "(5,002 characters) is not a duration" in refusal("--max_run_time", NUMBER)


BYTES = os.fsdecode(b"/nowhere/caf\xe9")
NO_UTF8 = "a name in it is not UTF-8, so safetensors, tokenizers and pyarrow can't open it: rename it"


@pytest.mark.parametrize("name", ["output_dir", "cache_dir", "model_name_or_path", "vision_tower"])
def test_names_that_libraries_do_not_open_are_refused_at_the_flag(name):
    flags = ["--model_name_or_path", "/"] if name == "vision_tower" else []
    assert f"--{name} {in_short(BYTES)}: {NO_UTF8}" in refusal(*flags, f"--{name}", BYTES).splitlines()


def test_other_commands_refuse_them_too(tmp_path):
    with pytest.raises(Exception, match=NO_UTF8):
        new_folder(str(tmp_path / os.fsdecode(b"\xff")))
    folder = tmp_path / os.fsdecode(b"m\xfcdel")
    folder.mkdir()
    with pytest.raises(ConfigError, match=f"^--model_path x: .*{NO_UTF8}"):
        check_folder(folder, "--model_path x")


@pytest.mark.parametrize("text", ["x\ud800y", "\udfff", "a/\ud83d"])
def test_half_of_a_character_is_in_no_name(text):
    assert path_problem(text) == f"{text}: a name in it has half a character, invalid in file names"


def test_data_may_have_any_name(tmp_path):
    data = tmp_path / os.fsdecode(b"d\xe4ta\n.json")
    data.write_text("[]")
    assert parse_arguments([*PLAIN, "--data_path", str(data)])
