# S supervised positions, D width of the language model, V vocabulary
"""Output layer and cross-entropy fused over chunks of rows: memory holds the logits of one chunk only.

The forward pass computes the summed loss and its gradients with three matrix products, as in Liger's linear
cross-entropy (arXiv 2410.10989), but without waiting for the device to count targets. For row-wise log-probabilities,
the upstream gradients are unknown in the forward pass, so backward computes the logits again: four products.
"""

import types
from collections.abc import Callable

import torch
from torch import nn

# Logits per chunk: many on a GPU, because each chunk reads and writes a gradient as large as the output layer; fewer on
# a CPU, to fit into its caches.
CHUNK_LOGITS = {"cuda": 2**27, "cpu": 2**22}
MIN_ROWS = 64  # minimum rows per chunk, for vocabularies of any size, because smaller products are slow
PRODUCT_NUMBERS = 2**25  # elements of the weight's gradient computed in half precision at a time
# Factor of the logits' gradients (at most 1) in float16. float16 ends at 65504, and rounds below 6e-8 to 0.
FLOAT16_SCALE = 2.0**15


def add_loss(output_layer: nn.Linear) -> None:
    """Let the output layer also compute the loss: output_layer(hidden, targets=targets, softcap=cap).

    hidden (S, D); targets (S,) int64; row_weights (S,) float32, not negative: factors of the rows; softcap c: logits x
    become c * tanh(x / c); by_row: a function like linear_log_probs, whose result is returned instead of the loss.
    Returns the summed cross-entropy, a float32 scalar, and the cross-entropy of each row, (S,) float64 without a
    gradient. The layer itself computes the loss, because ZeRO-3's hooks gather its weight in its forward.
    """
    output_layer.forward = types.MethodType(_forward, output_layer)


def _forward(
    self: nn.Linear,
    hidden: torch.Tensor,
    *,
    targets: torch.Tensor | None = None,
    softcap: float | None = None,
    by_row: Callable | None = None,
    row_weights: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    if targets is None:
        return type(self).forward(self, hidden)
    if by_row is not None:
        return by_row(hidden, self.weight, targets, softcap)
    return linear_cross_entropy(hidden, self.weight, targets, softcap, row_weights)


@torch.compiler.disable  # otherwise it is recompiled for each number of chunks
def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    softcap: float | None = None,
    row_weights: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the cross-entropy of logits hidden @ weight.T, summed and by row (see add_loss).

    hidden (S, D), weight (V, D), targets (S,) int64, row_weights (S,) float32; S may be 0. Products are computed in the
    precision of hidden or autocast, softmax in float32, and its logarithm and the sum over rows in float64, so that the
    logged loss hardly depends on how rows are divided over ranks. Backward can run only once. With float16, gradients
    stay in float32 until backward applies the loss scale, because unscaled sums can exceed float16.
    """
    device = hidden.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
    backward = torch.is_grad_enabled()
    with torch.autocast(device, enabled=False):
        return _LinearCrossEntropy.apply(hidden, weight, targets, softcap, backward, row_weights)


@torch.compiler.disable
def linear_log_probs(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, softcap: float | None = None
) -> torch.Tensor:
    """Compute the targets' log-probabilities, (S,) float64. Shapes and precision: see linear_cross_entropy.

    Backward recomputes the logits of each chunk. It stores the weight itself, not a copy in autocast's precision, so
    that ZeRO-3 can shard the weight between forward and backward.
    """
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
    with torch.autocast(device, enabled=False):
        return _LinearLogProbs.apply(hidden.to(dtype), weight, targets, softcap)


def chunk_rows(vocabulary: int, device_type: str) -> int:
    """Return the rows of logits per chunk."""
    return max(MIN_ROWS, CHUNK_LOGITS["cpu" if device_type == "cpu" else "cuda"] // vocabulary)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, targets, softcap, backward, row_weights):
        wants_hidden, wants_weight = (backward and wanted for wanted in ctx.needs_input_grad[:2])
        rows = chunk_rows(len(weight), hidden.device.type)
        row_losses = torch.empty(len(hidden), dtype=torch.float64, device=hidden.device)
        gradients = LogitGradients(hidden, weight, wants_hidden, wants_weight)
        factors, largest = row_weights, 1.0
        if row_weights is not None and gradients.in_float16 and len(hidden):
            # Scale the row weights to at most 1 to keep their products within float16's range.
            largest = row_weights.amax().clamp(min=1.0)
            factors = row_weights / largest
        for start in range(0, len(hidden), rows):
            h = hidden[start : start + rows]
            own = None if factors is None else factors[start : start + rows]
            d_logits, losses = softmax_minus_target(h @ weight.T, targets[start : start + rows], softcap, own)
            row_losses[start : start + rows] = losses
            gradients.add(start, h, d_logits)
            del d_logits  # free it before the next chunk's logits
        if row_weights is not None:
            row_losses *= row_weights
        ctx.gradients, ctx.in_float16, ctx.largest = gradients.summed(), gradients.in_float16, largest
        ctx.mark_non_differentiable(row_losses)
        return row_losses.sum().float(), row_losses

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, upstream, _):
        if ctx.gradients is None:
            raise RuntimeError("backward ran a second time: the loss no longer has its gradients")
        gradients, ctx.gradients = ctx.gradients, None
        if ctx.in_float16:
            upstream = upstream * (ctx.largest / FLOAT16_SCALE)
        gradients = [None if gradient is None else gradient.mul_(upstream) for gradient in gradients]
        if ctx.in_float16:
            gradients = [None if gradient is None else gradient.half() for gradient in gradients]
        return *gradients, None, None, None, None


class _LinearLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, targets, softcap):
        ctx.save_for_backward(hidden, weight, targets)
        ctx.softcap = softcap
        rows, used = chunk_rows(len(weight), hidden.device.type), weight.to(hidden.dtype)
        log_probs = torch.empty(len(hidden), dtype=torch.float64, device=hidden.device)
        for start in range(0, len(hidden), rows):
            logits = hidden[start : start + rows] @ used.T
            log_probs[start : start + rows] = -softmax_minus_target(logits, targets[start : start + rows], softcap)[1]
        return log_probs

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, upstream):
        hidden, weight, targets = ctx.saved_tensors
        rows, used = chunk_rows(len(weight), hidden.device.type), weight.to(hidden.dtype)
        gradients = LogitGradients(hidden, used, *ctx.needs_input_grad[:2])
        # Scale the upstream gradients to at most 1 to keep their products within float16's range.
        largest = upstream.abs().amax().clamp(min=torch.finfo(torch.float32).tiny) if len(upstream) else 1.0
        factors = (-upstream / largest)[:, None].to(hidden.dtype)
        for start in range(0, len(hidden), rows):
            h = hidden[start : start + rows]
            d_logits, _ = softmax_minus_target(h @ used.T, targets[start : start + rows], ctx.softcap)
            gradients.add(start, h, d_logits.mul_(factors[start : start + rows]))
            del d_logits
        scale = largest / FLOAT16_SCALE if gradients.in_float16 else largest
        d_hidden, d_weight = (None if found is None else found.mul_(scale) for found in gradients.summed())
        d_hidden = None if d_hidden is None else d_hidden.to(hidden.dtype)
        return d_hidden, None if d_weight is None else d_weight.to(weight.dtype), None, None


class LogitGradients:
    """Computes the gradients of hidden (S, D) and weight (V, D) from the logits' gradients, chunk by chunk.

    With float16, the gradients are float32 and multiplied by FLOAT16_SCALE. With other dtypes, sums over several chunks
    are float32, like the sums inside a matrix product.
    """

    def __init__(self, hidden: torch.Tensor, weight: torch.Tensor, wants_hidden: bool, wants_weight: bool) -> None:
        self.in_float16 = hidden.dtype == torch.float16
        self._weight, self._wants_weight = weight, wants_weight
        wide = torch.float32 if self.in_float16 else None
        self._d_hidden = torch.empty_like(hidden, dtype=wide) if wants_hidden else None
        self._d_weight = None
        if wants_weight and len(hidden) == 0:
            self._d_weight = torch.zeros_like(weight)
        elif wants_weight and (len(hidden) > chunk_rows(len(weight), hidden.device.type) or self.in_float16):
            self._d_weight = torch.zeros_like(weight, dtype=torch.float32)

    def add(self, start: int, h: torch.Tensor, d_logits: torch.Tensor) -> None:
        """Add a chunk of rows that begins at `start`: h (rows, D), d_logits (rows, V)."""
        rows = slice(start, start + len(h))
        if self._d_hidden is not None and self.in_float16:
            self._d_hidden[rows] = _float32_product(d_logits, self._weight)
        elif self._d_hidden is not None:
            torch.mm(d_logits, self._weight, out=self._d_hidden[rows])
        if self._wants_weight and self._d_weight is None:
            self._d_weight = d_logits.T @ h
        elif self._wants_weight:
            _add_product(self._d_weight, d_logits, h)

    def summed(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return the gradients of hidden and weight; None for one that is not wanted."""
        if self._d_weight is not None and not self.in_float16:
            self._d_weight = self._d_weight.to(self._weight.dtype)
        return self._d_hidden, self._d_weight


def _add_product(d_weight: torch.Tensor, d_logits: torch.Tensor, hidden: torch.Tensor) -> None:
    """Add d_logits.T @ hidden to d_weight (V, D) float32.

    In half precision the product is a separate tensor, so it is computed for a part of the vocabulary at a time: the
    whole would take 1.1 GB for 152,000 ids and a width of 3,584.
    """
    if d_weight.dtype == hidden.dtype:
        d_weight.addmm_(d_logits.T, hidden)
        return
    product = _float32_product if hidden.dtype == torch.float16 else torch.mm
    size = max(1, PRODUCT_NUMBERS // hidden.shape[1])
    for part, d_part in zip(d_weight.split(size), d_logits.split(size, 1)):
        part += product(d_part.T, hidden)


def _float32_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Multiply two float16 matrices with float32 accumulation and result."""
    if a.device.type == "cuda":
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()  # torch takes out_dtype on CUDA only


def softmax_minus_target(
    logits: torch.Tensor, targets: torch.Tensor, softcap: float | None, factors: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the cross-entropy's gradient, (rows, V) in the logits' precision, and its values, (rows,) float64.

    Overwrites logits. factors (rows,): factors of the gradient's rows. In float16 it is multiplied by FLOAT16_SCALE.
    """
    dtype = logits.dtype
    logits = logits.float()
    if softcap is not None:
        logits = logits.div_(softcap).tanh_().mul_(softcap)
        slope = 1 - (logits / softcap).square_()
    targets = targets[:, None]
    at_target = logits.gather(1, targets)
    largest = logits.amax(1, keepdim=True)
    weights = logits.sub_(largest).exp_()
    total = weights.sum(1, keepdim=True)
    losses = (total.double().log() + largest - at_target)[:, 0]
    gradient = weights.div_(total)
    gradient.scatter_add_(1, targets, torch.full_like(at_target, -1.0))
    if softcap is not None:
        gradient.mul_(slope)
    if factors is not None:
        gradient.mul_(factors[:, None])
    if dtype == torch.float16:
        gradient.mul_(FLOAT16_SCALE)
    return gradient.to(dtype), losses
