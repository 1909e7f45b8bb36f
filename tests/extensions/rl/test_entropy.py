"""Entropies and log-probabilities are those of the logits, in any number of chunks and precision."""

import pytest
import torch
from torch import nn

from llava_ds.extensions.rl.entropy import log_probs_and_entropies
from llava_ds.model import output_loss

ROWS, WIDTH, VOCABULARY = 150, 24, 500


def case(dtype: torch.dtype = torch.float32, rows: int = ROWS):
    torch.manual_seed(0)
    layer = nn.Linear(WIDTH, VOCABULARY, bias=False).to(dtype)
    output_loss.add_loss(layer)
    hidden = torch.randn(rows, WIDTH).mul_(3).to(dtype).requires_grad_()
    return layer, hidden, torch.randint(0, VOCABULARY, (rows,))


def textbook(layer, hidden, targets, softcap, factors):
    weight, hidden = (x.detach().double().requires_grad_() for x in (layer.weight, hidden))
    logits = hidden @ weight.T
    logs = (logits if softcap is None else softcap * torch.tanh(logits / softcap)).log_softmax(1)
    rows, entropies = logs.gather(1, targets[:, None])[:, 0], -(logs.exp() * logs).sum(1)
    (factors[0] * rows + factors[1] * entropies).sum().backward()
    return rows, entropies, hidden.grad, weight.grad


@pytest.mark.parametrize("chunk", [2**30, 1])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize(
    ("dtype", "scale", "most"),
    [
        (torch.float32, 1.0, 2e-6),
        (torch.bfloat16, 1.0, 2e-2),
        (torch.float16, 1.0, 3e-3),
        (torch.float16, 2.0**10, 3e-3),
    ],
    ids=str,
)
def test_values_and_gradients(monkeypatch, chunk, softcap, dtype, scale, most):
    monkeypatch.setitem(output_loss.CHUNK_LOGITS, "cpu", chunk)
    layer, hidden, targets = case(dtype)
    factors = torch.stack([torch.linspace(-2, 3, ROWS), torch.linspace(3, -1, ROWS)]).double() * (scale / ROWS)
    rows, entropies = layer(hidden, targets=targets, softcap=softcap, by_row=log_probs_and_entropies)
    (factors[0] * rows + factors[1] * entropies).sum().backward()
    found = rows, entropies, hidden.grad, layer.weight.grad
    assert rows.dtype == entropies.dtype == torch.float64 and hidden.grad.dtype == dtype
    for one, other in zip(found, textbook(layer, hidden, targets, softcap, factors), strict=True):
        assert (one.double() - other).norm() / other.norm() < most
    plain = layer(hidden, targets=targets, softcap=softcap, by_row=output_loss.linear_log_probs)
    torch.testing.assert_close(rows, plain, rtol=1e-5, atol=1e-5)


def test_no_rows_and_no_logits_kept(monkeypatch):
    monkeypatch.setitem(output_loss.CHUNK_LOGITS, "cpu", 1)
    layer, hidden, targets = case(rows=0)
    sum(layer(hidden, targets=targets, by_row=log_probs_and_entropies)).sum().backward()
    assert layer.weight.grad.count_nonzero() == 0
    layer, hidden, targets = case()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.numel()) or x, lambda x: x):
        layer(hidden, targets=targets, by_row=log_probs_and_entropies)
    assert max(kept) == max(hidden.numel(), layer.weight.numel())
