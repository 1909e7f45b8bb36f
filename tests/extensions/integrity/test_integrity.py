"""A changed bit changes its row's sum and is located; ranks at fault are told from the others."""

import random

import pytest
import torch

from llava_ds.extensions.integrity.extension import KINDS, SLOW_STEPS, Report, Speeds, faults, message
from llava_ds.extensions.integrity.watch import ROW, Snapshot, row_sums

FINE = Report(0, 0, 0, 0, 0, 0, 0, own=3, copies=7, all=12, work=100, spent_us=1000)
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("size", [1, 7, 8 * ROW, 8 * ROW + 5])
def test_every_bit_counts_wherever_a_view_begins(dtype, size):
    torch.manual_seed(0)
    draw, whole = random.Random(0), (100 * torch.randn(size + 1)).abs().to(dtype)
    for tensor in (whole, whole[1:]):
        before = row_sums(tensor)
        for _ in range(20):
            bits, place = tensor.view(WORDS[tensor.element_size()]), draw.randrange(len(tensor))
            mask = torch.tensor(1 << draw.randrange(8 * tensor.element_size())).to(bits.dtype)
            bits[place] ^= mask
            assert (row_sums(tensor) != before).sum() == 1
            bits[place] ^= mask
            assert torch.equal(row_sums(tensor), before)


def test_a_changed_number_is_located_among_small_and_large_tensors():
    sizes = {"a": 5, "b": 40_000, "c": 10_000, "d": 3}
    tensors = {name: torch.randn(size) for name, size in sizes.items()}
    flat = torch.randn(30_000)
    kept = Snapshot(
        [(tensor, [(name, 0, tensor.numel())]) for name, tensor in tensors.items()]
        + [(flat, [("e", 0, 10_000), ("f", 10_000, 30_000)]), (flat.clone(), [("g", 0, 30_000)])],
        flat.device,
    )
    assert not kept.changed().any()
    found = {"b": ["b"], "c": ["c", "d"], "d": ["c", "d"]}  # the end of c shares a row with d
    places = [(tensors[name], len(tensors[name]) - 1, names) for name, names in found.items()]
    for tensor, place, names in (*places, (tensors["c"], 4_000, ["c"]), (flat, 25_000, ["f"])):
        before = tensor[place].item()
        tensor[place] = before + 1
        assert kept.names(kept.changed()) == names
        tensor[place] = before


def test_ranks_at_fault_are_told_from_the_others():
    assert faults([FINE, FINE]) == {}
    for kind in list(KINDS)[:6]:
        assert faults([FINE, FINE._replace(**{kind: 1})]) == {1: [kind]}
    assert faults([FINE._replace(stale=1), FINE]) == {0: ["stale"]}
    assert faults([FINE._replace(stale=1)] * 2) == {}  # a skipped step
    other = FINE._replace(copies=6, all=11)
    assert faults([FINE, other, FINE]) == {1: ["differs"]}
    written = [FINE._replace(own=3), FINE._replace(own=4)]  # together 7
    assert faults([written[0], written[1]._replace(copies=8, all=13)]) == {1: ["differs"]}
    assert faults([FINE, FINE._replace(all=11)]) == {0: ["differs"], 1: ["differs"]}
    assert faults([FINE, FINE._replace(all=11, stale=1)]) == {1: ["stale"]}


def test_a_rank_is_slow_after_some_steps_in_a_row_and_said_once():
    speeds = Speeds()
    slow = FINE._replace(spent_us=2100)
    said = [speeds.add([FINE, slow if step > 3 else FINE, FINE]) for step in range(3 * SLOW_STEPS)]
    (warned,) = [(step, *each.items()) for step, each in enumerate(said) if each]
    assert warned[0] < 4 + SLOW_STEPS and warned[1][0] == 1 and warned[1][1] > 1.5
    speeds = Speeds()
    more = FINE._replace(spent_us=2100, work=210)
    assert not any(speeds.add([FINE, more]) for _ in range(2 * SLOW_STEPS))


def test_the_message_names_rank_step_and_parameter():
    text = message(1234, {1: ["weight", "stale"]}, [["x"], ["a", "b", "c", "d"]], every=10)
    assert text.startswith("step 1,234: silent corruption\n  rank 1: a weight changed")
    assert "in a or b or c or others\n  rank 1: a stale shard" in text
    assert "before step 1,224" in text and "x" not in text.split("\n")[1]
