"""What of a long list of values is tried every day."""

from collections.abc import Collection

import pytest


def rest(*values: object) -> list:
    """Values of a parameter that are left to make test-long, or make test-cuda."""
    return [pytest.param(value, marks=pytest.mark.long) for value in values]


def few(values: Collection, daily: Collection) -> list:
    """All values, those apart that are not tried every day."""
    assert set(daily) <= set(values)
    return [value if value in daily else pytest.param(*_in_a_row(value), marks=pytest.mark.long) for value in values]


def _in_a_row(value: object) -> tuple:
    return value if isinstance(value, tuple) else (value,)
