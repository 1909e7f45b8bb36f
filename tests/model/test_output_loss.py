"""The loss out of the output layer is torch's cross-entropy of its logits, whatever the chunks, and keeps none."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from llava_ds.model import output_loss
from llava_ds.model.output_loss import add_loss

ROWS, WIDTH, VOCABULARY = 300, 24, 500


def case(dtype: torch.dtype = torch.float32, rows: int = ROWS, frozen: bool = False):
    torch.manual_seed(0)
    layer = nn.Linear(WIDTH, VOCABULARY, bias=False).to(dtype)
    layer.weight.requires_grad_(not frozen)
    add_loss(layer)
    hidden = torch.randn(rows, WIDTH).mul_(3).to(dtype).requires_grad_()
    return layer, hidden, torch.randint(0, VOCABULARY, (rows,))


def expected(layer, hidden, targets, softcap=None, scale=1.0):
    """Loss and gradients in float64, by the formula."""
    weight, hidden = (x.detach().double().requires_grad_() for x in (layer.weight, hidden))
    logits = hidden @ weight.T
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    loss = F.cross_entropy(logits, targets, reduction="sum")
    (loss * scale).backward()
    return loss, hidden.grad, weight.grad


def differs(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return ((found.double() - wanted).abs().max() / wanted.abs().max()).item()


@pytest.mark.parametrize("chunk", [2**30, 128 * VOCABULARY, 1])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_loss_and_gradients(monkeypatch, chunk, softcap):
    monkeypatch.setitem(output_loss.CHUNK_LOGITS, "cpu", chunk)
    layer, hidden, targets = case()
    loss = layer(hidden, targets=targets, softcap=softcap)
    (loss * 0.37).backward()
    wanted = expected(layer, hidden, targets, softcap, 0.37)
    assert loss.dtype == torch.float32 and loss.shape == ()
    assert max(map(differs, (loss, hidden.grad, layer.weight.grad), wanted)) < 2e-6
    assert torch.equal(layer(hidden), F.linear(hidden, layer.weight))  # without targets it is what it was


@pytest.mark.parametrize("chunk", [2**30, 1])
@pytest.mark.parametrize("autocast", [False, True])
def test_in_half_precision_it_is_no_further_off_than_torchs_own(monkeypatch, chunk, autocast):
    """Autocast computes so of float32 weights. 300 rows in chunks add up in float32."""
    monkeypatch.setitem(output_loss.CHUNK_LOGITS, "cpu", chunk)
    dtype = torch.float32 if autocast else torch.bfloat16
    errors = []
    for ours in (True, False):
        layer, hidden, targets = case(dtype)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            if ours:
                loss = layer(hidden, targets=targets)
            else:
                loss = F.cross_entropy(layer(hidden).float(), targets, reduction="sum")
        loss.backward()
        assert hidden.grad.dtype == layer.weight.grad.dtype == dtype
        wanted = expected(layer, hidden, targets)
        errors.append([differs(*pair) for pair in zip((loss, hidden.grad, layer.weight.grad), wanted)])
    for own, torchs in zip(*errors):
        assert own < 1.5 * torchs + 1e-6


def test_nothing_supervised_gives_zero_gradients():
    layer, hidden, targets = case(rows=0)
    loss = layer(hidden, targets=targets)
    loss.backward()
    assert loss == 0 and hidden.grad.shape == (0, WIDTH)
    assert layer.weight.grad.shape == (VOCABULARY, WIDTH) and not layer.weight.grad.any()


class Products(TorchDispatchMode):
    """The matrix products, and the sizes of all that is made."""

    def __init__(self) -> None:
        super().__init__()
        self.count, self.largest = 0, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **kwargs or {})
        self.count += function.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_)
        if isinstance(result, torch.Tensor):
            self.largest = max(self.largest, result.numel())
        return result


@pytest.mark.parametrize(("frozen", "no_grad", "products"), [(False, False, 3), (True, False, 2), (False, True, 1)])
def test_only_what_trains_is_computed(frozen, no_grad, products):
    layer, hidden, targets = case(frozen=frozen)
    with Products() as seen:
        with torch.set_grad_enabled(not no_grad):
            loss = layer(hidden, targets=targets)
        if not no_grad:
            loss.backward()
    assert seen.count == products


def test_no_more_logits_exist_than_a_chunks(monkeypatch):
    monkeypatch.setitem(output_loss.CHUNK_LOGITS, "cpu", 1)
    layer, hidden, targets = case()
    kept = []
    with (
        torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.numel()) or x, lambda x: x),
        Products() as seen,
    ):
        layer(hidden, targets=targets).backward()
    assert max(kept, default=0) <= WIDTH * VOCABULARY
    assert seen.largest == output_loss.MIN_ROWS * VOCABULARY < ROWS * VOCABULARY / 4


def test_a_second_backward_says_so():
    layer, hidden, targets = case()
    loss = layer(hidden, targets=targets)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="propagated backward a second time"):
        loss.backward()
