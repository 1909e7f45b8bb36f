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


def expected(layer, hidden, targets, softcap=None, scale=1.0, weights=1.0):
    """Loss and gradients in float64, by the formula."""
    weight, hidden = (x.detach().double().requires_grad_() for x in (layer.weight, hidden))
    logits = hidden @ weight.T
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    loss = (weights * F.cross_entropy(logits, targets, reduction="none")).sum()
    (loss * scale).backward()
    return loss, hidden.grad, weight.grad


def differs(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return ((found.double() - wanted).abs().max() / wanted.abs().max()).item()


@pytest.mark.parametrize("chunk", [2**30, 128 * VOCABULARY, 1])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_loss_and_gradients(monkeypatch, chunk, softcap):
    monkeypatch.setitem(output_loss.CHUNK_LOGITS, "cpu", chunk)
    layer, hidden, targets = case()
    loss, by_row = layer(hidden, targets=targets, softcap=softcap)
    (loss * 0.37).backward()
    wanted = expected(layer, hidden, targets, softcap, 0.37)
    assert loss.dtype == torch.float32 and loss.shape == ()
    logits = layer(hidden.detach())
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    assert torch.allclose(by_row.float(), F.cross_entropy(logits, targets, reduction="none"), atol=1e-5)
    assert by_row.dtype == torch.float64 and not by_row.requires_grad
    assert by_row.sum().float() == loss
    assert max(map(differs, (loss, hidden.grad, layer.weight.grad), wanted)) < 2e-6
    assert torch.equal(layer(hidden), F.linear(hidden, layer.weight))  # without targets it is what it was


@pytest.mark.parametrize("chunk", [2**30, 1])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_every_row_counts_by_its_weight(monkeypatch, chunk, softcap):
    monkeypatch.setitem(output_loss.CHUNK_LOGITS, "cpu", chunk)
    layer, hidden, targets = case()
    weights = torch.rand(ROWS) * 3
    loss, by_row = layer(hidden, targets=targets, softcap=softcap, row_weights=weights)
    (loss * 0.37).backward()
    wanted = expected(layer, hidden, targets, softcap, 0.37, weights.double())
    assert max(map(differs, (loss, hidden.grad, layer.weight.grad), wanted)) < 2e-6
    assert by_row.sum().float() == loss
    assert torch.equal(by_row, layer(hidden, targets=targets, softcap=softcap)[1] * weights)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("weight", [1.0, 0.5])
def test_equal_weights_scale_loss_and_gradients_exactly(dtype, weight):
    found = []
    for weights in (None, torch.full((ROWS,), weight)):
        layer, hidden, targets = case(dtype)
        loss, by_row = layer(hidden, targets=targets, row_weights=weights)
        (loss / ROWS).backward()
        found.append((loss, by_row, hidden.grad, layer.weight.grad))
    least = torch.finfo(dtype).smallest_normal / weight  # below it half of a number may round
    for plain, weighed in zip(*found):
        exact = plain.abs() >= least
        assert torch.equal(plain[exact] * weight, weighed[exact]) and exact.any()


def test_weights_above_one_fit_into_float16():
    """The gradient of a logit counts 2**15 times as much there, and float16 ends below 2**16."""
    layer, hidden, targets = case(torch.float16)
    weights = torch.full((ROWS,), 1.0)
    weights[::3] = 7.0
    (layer(hidden, targets=targets, row_weights=weights)[0] / ROWS).backward()
    wanted = expected(layer, hidden, targets, scale=1 / ROWS, weights=weights.double())
    assert max(map(differs, (hidden.grad, layer.weight.grad), wanted[1:])) < 3e-3
    layer, hidden, targets = case(torch.float16, rows=0)
    layer(hidden, targets=targets, row_weights=torch.zeros(0))[0].backward()
    assert not layer.weight.grad.any()


def test_losses_of_rows_keep_what_float32_would_round_off():
    """They are logged, and two numbers of ranks round differently."""
    torch.manual_seed(0)
    logits, targets = torch.randn(ROWS, VOCABULARY).mul_(5), torch.randint(0, VOCABULARY, (ROWS,))
    exact = F.cross_entropy(logits.double(), targets, reduction="none")
    in_float32 = F.cross_entropy(logits, targets, reduction="none")
    _, values = output_loss.softmax_minus_target(logits.clone(), targets, None)
    assert (values - exact).abs().mean() < (in_float32 - exact).abs().mean() / 3


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
                loss, _ = layer(hidden, targets=targets)
            else:
                loss = F.cross_entropy(layer(hidden).float(), targets, reduction="sum")
        loss.backward()
        assert hidden.grad.dtype == layer.weight.grad.dtype == dtype
        wanted = expected(layer, hidden, targets)
        errors.append([differs(*pair) for pair in zip((loss, hidden.grad, layer.weight.grad), wanted)])
    for own, torchs in zip(*errors):
        assert own < 1.5 * torchs + 1e-6


@pytest.mark.parametrize("chunk", [2**30, 1])
@pytest.mark.parametrize("autocast", [False, True])
def test_float16_gradients_of_a_sum_may_exceed_float16(monkeypatch, chunk, autocast):
    """The scale comes in backward only: what it brings back into float16 has to survive until then."""
    monkeypatch.setitem(output_loss.CHUNK_LOGITS, "cpu", chunk)
    layer, hidden, targets = case(torch.float32 if autocast else torch.float16, rows=4096)
    targets[:3072] = 7
    with torch.no_grad():
        hidden[:, 3] = 25
        layer.weight[:, 3] = 0
    with torch.autocast("cpu", torch.float16, enabled=autocast):
        loss, _ = layer(hidden, targets=targets)
    loss.div(4096).backward()
    wanted = expected(layer, hidden, targets, scale=1 / 4096)
    assert 10 < wanted[2].abs().max() < 25 and wanted[2].abs().max() * 4096 > torch.finfo(torch.float16).max
    assert max(map(differs, (loss, hidden.grad, layer.weight.grad), wanted)) < 2e-3


def test_float16_gradients_do_not_vanish_before_the_loss_scale():
    """A probability of 1.5e-8 is none in float16, and 2**20 times it is one."""
    layer, hidden, targets = case(torch.float16, rows=64)
    with torch.no_grad():
        hidden[:] = 1
        layer.weight[:] = 0
        layer.weight[0] = 18 / WIDTH
    targets[:] = 0
    (layer(hidden, targets=targets)[0] * 2.0**20).backward()
    wanted = expected(layer, hidden, targets, scale=2.0**20)
    assert wanted[2][1] @ hidden[0].detach().double() > 1
    assert max(map(differs, (hidden.grad, layer.weight.grad[1:]), (wanted[1], wanted[2][1:]))) < 3e-2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_nothing_supervised_gives_zero_gradients(dtype):
    layer, hidden, targets = case(dtype, rows=0)
    loss, _ = layer(hidden, targets=targets)
    loss.backward()
    assert loss == 0 and hidden.grad.shape == (0, WIDTH)
    assert layer.weight.grad.shape == (VOCABULARY, WIDTH) and not layer.weight.grad.any()


class Products(TorchDispatchMode):
    """The matrix products, and the sizes of all that is made."""

    def __init__(self) -> None:
        super().__init__()
        self.count, self.largest, self.shapes = 0, 0, []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **kwargs or {})
        if function.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_):
            self.count += 1
            self.shapes.append(tuple(result.shape))
        if isinstance(result, torch.Tensor):
            self.largest = max(self.largest, result.numel())
        return result


@pytest.mark.parametrize(("frozen", "no_grad", "products"), [(False, False, 3), (True, False, 2), (False, True, 1)])
def test_only_what_trains_is_computed(frozen, no_grad, products):
    layer, hidden, targets = case(frozen=frozen)
    with Products() as seen:
        with torch.set_grad_enabled(not no_grad):
            loss, _ = layer(hidden, targets=targets)
        if not no_grad:
            loss.backward()
    assert seen.count == products


def test_no_more_logits_exist_than_a_chunks(monkeypatch):
    monkeypatch.setitem(output_loss.CHUNK_LOGITS, "cpu", 1)
    layer, hidden, targets = case()
    with Products() as seen:
        loss, _ = layer(hidden, targets=targets)
        kept = [gradient.shape for gradient in loss.grad_fn.gradients]
        assert not loss.grad_fn.saved_tensors  # all that is kept is there
        loss.backward()
    assert kept == [hidden.shape, layer.weight.shape]
    assert seen.largest == output_loss.MIN_ROWS * VOCABULARY < ROWS * VOCABULARY / 4


def test_a_second_backward_says_so():
    layer, hidden, targets = case()
    loss, _ = layer(hidden, targets=targets)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="backward ran a second time"):
        loss.backward()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_half_precision_products_are_added_to_the_weights_gradient_by_parts(monkeypatch, dtype):
    """With 152,000 ids a whole product takes 1.1 GB beside the sum."""
    monkeypatch.setitem(output_loss.CHUNK_LOGITS, "cpu", 1)
    monkeypatch.setattr(output_loss, "PRODUCT_NUMBERS", 130 * WIDTH)
    layer, hidden, targets = case(dtype)
    with Products() as seen:
        loss, _ = layer(hidden, targets=targets)
    loss.backward()
    of_weights = [shape for shape in seen.shapes if shape[1] == WIDTH and shape[0] != output_loss.MIN_ROWS]
    assert max(shape[0] for shape in of_weights) == 130 and VOCABULARY % 130
    assert differs(layer.weight.grad, expected(layer, hidden, targets)[2]) < 2e-2


@pytest.mark.parametrize("chunk", [2**30, 128 * VOCABULARY, 1])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_log_probabilities_by_row_and_their_gradients(monkeypatch, chunk, softcap):
    """Of any function of them: here each row has a coefficient of its own."""
    monkeypatch.setitem(output_loss.CHUNK_LOGITS, "cpu", chunk)
    layer, hidden, targets = case()
    factors = torch.linspace(-2, 3, ROWS, dtype=torch.float64)
    found = layer(hidden, targets=targets, softcap=softcap, by_row=output_loss.linear_log_probs)
    (found * factors).sum().backward()
    weight, wide = (x.detach().double().requires_grad_() for x in (layer.weight, hidden))
    logits = wide @ weight.T
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    wanted = -F.cross_entropy(logits, targets, reduction="none")
    (wanted * factors).sum().backward()
    assert found.dtype == torch.float64 and found.shape == (ROWS,)
    assert max(map(differs, (found, hidden.grad, layer.weight.grad), (wanted, wide.grad, weight.grad))) < 2e-6


def test_log_probabilities_are_the_losses_of_training():
    layer, hidden, targets = case()
    assert torch.equal(
        layer(hidden, targets=targets, by_row=output_loss.linear_log_probs), -layer(hidden, targets=targets)[1]
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [1.0, 2.0**16])
def test_gradients_of_log_probabilities_in_half_precision(dtype, scale):
    """scale: of the loss in float16, which brings gradients as large as it."""
    layer, hidden, targets = case(dtype)
    layer(hidden, targets=targets, by_row=output_loss.linear_log_probs).mul(-scale / ROWS).sum().backward()
    _, d_hidden, d_weight = expected(layer, hidden, targets, scale=1 / ROWS)
    most = {torch.bfloat16: 2e-2, torch.float16: 3e-3}[dtype]
    for found, wanted in ((hidden.grad, d_hidden), (layer.weight.grad, d_weight)):
        assert found.dtype == dtype and ((found.double() / scale - wanted).norm() / wanted.norm()) < most


def test_log_probabilities_without_rows_and_with_a_frozen_weight():
    layer, hidden, targets = case(rows=0)
    layer(hidden, targets=targets, by_row=output_loss.linear_log_probs).sum().backward()
    assert layer.weight.grad.count_nonzero() == 0
    layer, hidden, targets = case(frozen=True)
    layer(hidden, targets=targets, by_row=output_loss.linear_log_probs).sum().backward()
    assert layer.weight.grad is None and hidden.grad.count_nonzero()


def test_log_probabilities_keep_no_logits(monkeypatch):
    monkeypatch.setitem(output_loss.CHUNK_LOGITS, "cpu", 1)
    layer, hidden, targets = case()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.numel()) or x, lambda x: x):
        layer(hidden, targets=targets, by_row=output_loss.linear_log_probs)
    assert max(kept) == max(hidden.numel(), layer.weight.numel())
