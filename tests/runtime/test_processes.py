"""Processes that a rank forks for parts of its work."""

import os
import signal

import pytest

from llava_ds.constants import DataError
from llava_ds.runtime.children import in_processes


class TwoParts(Exception):
    """An error that pickle writes and can't read again: it calls the class with one argument."""

    def __init__(self, where: str, what: str) -> None:
        super().__init__(f"{where}: {what}")


def test_values_come_in_the_order_of_the_parts():
    assert in_processes(lambda part: part * part, [3, 1, 2]) == [9, 1, 4]


def test_an_error_is_raised_here():
    with pytest.raises(ZeroDivisionError):
        in_processes(lambda part: 1 // part, [1, 0])


def test_an_error_that_no_other_process_can_read_keeps_its_class_and_message():
    def fail(part):
        raise TwoParts("row 7", "no answer")

    with pytest.raises(RuntimeError, match="TwoParts: row 7: no answer"):
        in_processes(fail, [1])


def test_a_killed_process_is_told():
    with pytest.raises(DataError, match="was killed"):
        in_processes(lambda part: os.kill(os.getpid(), signal.SIGKILL), [1])
