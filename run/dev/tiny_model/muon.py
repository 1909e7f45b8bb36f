"""Muon (Jordan et al., 2024): momentum with orthogonalised matrices.

torch.optim.Muon (2.13) iterates in bfloat16, matrix by matrix: on a CPU without bfloat16 units its step took longer
than forward and backward together. This one uses float32, over stacks of equal shapes.
"""

import math

import torch

MOMENTUM = 0.95
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5


class Muon(torch.optim.Optimizer):
    """Updates matrices by the orthogonalised Nesterov momentum of their gradients."""

    def __init__(self, matrices, lr):
        super().__init__(matrices, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            by_shape = {}
            for matrix in group["params"]:
                by_shape.setdefault(tuple(matrix.shape), []).append(matrix)
            for (rows, columns), matrices in by_shape.items():
                updates = torch.stack([self._momentum(matrix) for matrix in matrices])
                updates = _orthogonal(updates) * max(1, rows / columns) ** 0.5
                for matrix, update in zip(matrices, updates, strict=True):
                    matrix.add_(update, alpha=-group["lr"])

    def _momentum(self, matrix):
        state = self.state[matrix]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(matrix)
        state["momentum"].lerp_(matrix.grad, 1 - MOMENTUM)
        return matrix.grad.lerp(state["momentum"], MOMENTUM)


def _orthogonal(stack):
    """Return (N, R, C) matrices with singular values near 1, by Newton-Schulz iteration."""
    wide = stack.shape[1] <= stack.shape[2]
    x = stack if wide else stack.mT
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    a, b, c = NEWTON_SCHULZ
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x if wide else x.mT


class Optimizers:
    """Muon for the layers' matrices, AdamW for everything else, each with warm_up_then_cosine."""

    def __init__(self, model, layers, recipe):
        """layers: the model's matrices that Muon updates."""
        in_layers = {id(p) for p in layers}
        others = [p for p in model.parameters() if id(p) not in in_layers]
        self.optimizers = [
            Muon(layers, lr=recipe.muon_learning_rate),
            torch.optim.AdamW(others, lr=recipe.learning_rate, betas=(0.9, 0.98), weight_decay=0.0),
        ]
        self.schedules = [warm_up_then_cosine(optimizer, recipe.num_steps) for optimizer in self.optimizers]
        self.parameters = list(model.parameters())

    def step(self, loss, max_norm=math.inf):
        """Run backward and one update."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        loss.backward()
        if max_norm < math.inf:
            torch.nn.utils.clip_grad_norm_(self.parameters, max_norm)
        for each in (*self.optimizers, *self.schedules):
            each.step()


def warm_up_then_cosine(optimizer, num_steps):
    """Return a schedule for an optimizer: a linear start over a thirtieth of the steps, then cosine to 0."""
    warm_up = max(1, num_steps // 30)
    return torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warm_up, 0.5 * (1 + math.cos(math.pi * step / num_steps)))
    )
