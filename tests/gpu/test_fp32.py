# H query heads, K key heads, T tokens, E head width
"""fp32 on a GPU: TF32 only where it is allowed, and no scores stored where query heads share key heads."""

import pytest
import torch
import torch.nn.functional as F
from gpu_lane import DEVICE, REHEARSED

from llava_ds.model import attention
from llava_ds.model.attention import Rule
from llava_ds.runtime.tf32 import allow_tf32, exact_fp32

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def off_afterwards():
    yield
    allow_tf32(False)


def rounding() -> tuple[float, float]:
    """Of a matrix product and of a patch convolution, relative to the largest value."""
    generator = torch.Generator().manual_seed(0)
    a, b, pixels, weight = (
        torch.randn(*shape, generator=generator).to(DEVICE)
        for shape in ((512, 512), (512, 512), (2, 3, 336, 336), (64, 3, 14, 14))
    )
    found = a @ b, F.conv2d(pixels, weight, stride=14)
    wanted = a.double() @ b.double(), F.conv2d(pixels.double(), weight.double(), stride=14)
    return tuple(((x - y).abs().max() / y.abs().max()).item() for x, y in zip(found, wanted))


def test_tf32_is_used_by_both_libraries_or_by_none(record_property):
    has_tf32 = not REHEARSED and torch.cuda.get_device_capability() >= (8, 0)
    for allowed in (True, False):
        allow_tf32(allowed)
        figures = rounding()
        record_property(f"tf32 {allowed}", " and ".join(f"{figure:.1e}" for figure in figures))
        assert all((figure > 1e-5) == (has_tf32 and allowed) for figure in figures)
    allow_tf32(True)
    with exact_fp32():
        assert max(rounding()) < 1e-5


def test_shared_key_heads_in_fp32_store_no_scores(record_property):
    length, heads = (64, 4) if REHEARSED else (4096, 16)
    query, key, value = (
        torch.randn(1, h, length, 64, device=DEVICE, requires_grad=True) for h in (heads, heads // 4, heads // 4)
    )
    starts = torch.tensor([0, length], dtype=torch.int32, device=DEVICE)
    if not REHEARSED:
        torch.cuda.reset_peak_memory_stats()
    before = 0 if REHEARSED else torch.cuda.memory_allocated()
    attention.attend(query, key, value, attention.Bounds.of(starts, length), Rule(0.125)).sum().backward()
    grown = 0 if REHEARSED else torch.cuda.max_memory_allocated() - before
    scores = 4 * heads * length**2
    record_property("memory", f"{grown / 1e6:.0f} MB; the scores alone would take {scores / 1e6:.0f} MB")
    assert grown < scores / 2
    assert key.grad.shape == key.shape
