"""The numbers of heads that sequence parallelism can share out; the exchange itself is in tests/distributed."""

import pytest

from llava_ds.extensions.sequence_parallel.exchange import heads_problem


@pytest.mark.parametrize(
    ("heads", "key_heads", "ranks", "fits"),
    [
        (32, 32, 8, True),
        (32, 8, 8, True),
        (32, 8, 16, True),  # two ranks have the same key head
        (56, 8, 8, True),
        (56, 8, 7, False),  # a rank would need parts of two key heads
        (4, 2, 3, False),
        (12, 8, 6, False),
        (9, 3, 9, True),
    ],
)
def test_heads_that_can_be_shared_out(heads, key_heads, ranks, fits):
    problem = heads_problem(heads, key_heads, ranks)
    assert (problem is None) is fits
    if not fits:
        allowed = [int(number) for number in problem.rpartition("give ")[2].split(", ")]
        assert allowed[0] == 1 and ranks not in allowed
        assert all(heads_problem(heads, key_heads, number) is None for number in allowed)
