"""A chat template of a stranger's: bounded in memory, time and length, whatever it is made of."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from llava_ds.constants import ConfigError, DataError
from llava_ds.data import template_process
from llava_ds.data.chat_template import render_own_prompt
from llava_ds.data.sample import Message

TALK = [Message("human", "What is it?")]
LOOPS = "{% for b in x %}" * 3 + "{% endfor %}" * 3


@pytest.mark.parametrize(
    ("source", "error", "said"),
    [
        ("{{ 1 / 0 }}", DataError, "division by zero"),
        ("{{ messages[7]['content'] }}", DataError, "list object has no element 7"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", ConfigError, "recurses without end"),
        ("{{ 'x' * 3000000000 }}", ConfigError, "takes more than 512 MB"),
        ("{{ 'x' | center(90000000) }}", ConfigError, "renders a conversation as 90,000,000 characters"),
        ("{% set x = range(99999) | list %}" + LOOPS, ConfigError, "takes longer than 1 seconds"),
        ("{{ messages.__class__.__mro__ }}", DataError, "access to attribute '__class__'.* is unsafe"),
        ("{% if %}", DataError, "Expected an expression"),
    ],
)
def test_what_takes_too_much_is_refused(source, error, said, tokenizer, monkeypatch):
    if "longer" in said:  # one of its own, for the process that the others share has more time
        monkeypatch.setattr(template_process, "CPU_SECONDS", 1)
        monkeypatch.setattr(template_process, "_of_process", {})
    monkeypatch.setattr(tokenizer, "chat_template", source)
    begun = time.monotonic()
    with pytest.raises(error, match=said):
        render_own_prompt(TALK, tokenizer)
    assert time.monotonic() - begun < 60


def test_after_one_that_took_too_much_the_next_is_rendered(tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", "{{ 'x' * 3000000000 }}")
    with pytest.raises(ConfigError):
        render_own_prompt(TALK, tokenizer)
    monkeypatch.setattr(tokenizer, "chat_template", "{{ messages[0]['content'] }}")
    assert render_own_prompt(TALK, tokenizer) == "What is it?"


def test_after_one_that_a_signal_ended_the_next_is_rendered(tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", "{{ messages[0]['content'] }}")
    render_own_prompt(TALK, tokenizer)
    child = template_process._of_process[os.getpid()]._child
    child.kill()
    child.wait()
    assert render_own_prompt(TALK, tokenizer) == "What is it?"


def test_no_signal_to_the_group_of_a_run_reaches_it(tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", "{{ messages[0]['content'] }}")
    render_own_prompt(TALK, tokenizer)
    assert os.getpgid(template_process._of_process[os.getpid()]._child.pid) != os.getpgid(0)


@pytest.mark.parametrize(
    ("ends", "said"),
    [
        ("os.kill(os.getpid(), 9)", r"was ended by SIGKILL; if memory ran out: free memory"),
        ("time.sleep(60)", "gave no answer for 1 seconds"),
        ("os._exit(3)", "ended with exit code 3"),
    ],
)
def test_how_it_ended_is_said(monkeypatch, ends, said):
    if "sleep" in ends:
        monkeypatch.setattr(template_process, "WAIT_SECONDS", 1)
    monkeypatch.setattr(template_process, "START", f"import os, sys, time; sys.stdin.readline(); {ends}")
    with pytest.raises(ConfigError, match=said) as caught:
        template_process.TemplateProcess().render(conversations=[])
    assert "longer than" not in str(caught.value)


def test_it_ends_with_the_process_that_asks(tmp_path):
    source = "import os, sys; from llava_ds.data.template_process import TemplateProcess; "
    source += "print(TemplateProcess()._child.pid, flush=True); os.kill(os.getpid(), 9)"
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=60)
    child = Path(f"/proc/{int(done.stdout)}/stat")
    deadline = time.monotonic() + 60
    while child.exists() and child.read_text().rpartition(")")[2].split()[0] != "Z" and time.monotonic() < deadline:
        time.sleep(0.1)
    assert time.monotonic() < deadline


def test_a_forked_process_asks_one_of_its_own(tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", "{{ messages[0]['content'] }}")
    render_own_prompt(TALK, tokenizer)
    child = os.fork()
    if child == 0:
        same = render_own_prompt(TALK, tokenizer) == "What is it?"
        os._exit(0 if same and list(template_process._of_process) == [os.getpid()] else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert render_own_prompt(TALK, tokenizer) == "What is it?"  # the first one's is its own still
