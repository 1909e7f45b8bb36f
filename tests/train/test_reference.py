"""Cached log-probabilities are those of the same data, weights and arithmetic; tests/distributed has their numbers."""

import pytest
import torch

from llava_ds.runtime.tf32 import allow_tf32, tf32_allowed
from llava_ds.train.reference import cache_name

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture(autouse=True)
def same_switches():
    before = tf32_allowed()
    yield
    allow_tf32(before)


def test_the_file_is_another_where_the_numbers_are():
    names = set()
    for tf32 in (False, True):
        allow_tf32(tf32)
        names |= {cache_name("d", "w", dtype, CUDA) for dtype in (torch.float32, torch.bfloat16)}
        names.add(cache_name("d", "w", torch.float32, CPU))
    assert len(names) == 3  # fp32 with and without TF32, which means nothing to bf16 or a CPU; bf16
    assert len({cache_name(*each, torch.float32, CPU) for each in (("d", "w"), ("e", "w"), ("d", "v"))}) == 3
