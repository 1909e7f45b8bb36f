"""Loads the fake CUDA library before torch."""

from fake_cuda import pytest_configure, pytest_runtest_setup  # noqa: F401
