# T tokens that a router sees, E experts, K experts per token
"""Mixtures of experts: choose how experts are computed, compute the load-balancing loss, and measure the load."""

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import nn
from transformers import PreTrainedConfig

from llava_ds.constants import ConfigError
from llava_ds.extensions.mixtures.flags import Flags
from llava_ds.extensions.mixtures.kinds import expert_names, is_mixture, is_upcycled
from llava_ds.extensions.mixtures.upcycled import expert_layers

IMPLEMENTATIONS = {
    "grouped_mm": "all experts of a layer in one grouped matrix product",
    "batched_mm": "each token with its own copy of its experts' matrices",
    "eager": "one after the other; the host reads in every layer which experts have tokens",
}


def mixture_problems(flags: Flags, config: PreTrainedConfig, path: str) -> Iterator[str]:
    """Yield a line per flag that needs a model with experts, if this model has none."""
    for name in ("router_aux_loss_coef", "experts_implementation"):
        knows = is_mixture(config) or (is_upcycled(config) and name == "router_aux_loss_coef")
        if getattr(flags, name) and not knows:
            yield (
                f"--{name} is for mixtures of experts, but --model_name_or_path {path} is a {config.model_type}: "
                "leave it out"
            )


def check_implementation(wanted: str | None, only: str | None) -> None:
    """Raise ConfigError if the adapters on the experts allow only an implementation other than `wanted`."""
    if None in (wanted, only) or wanted == only:
        return
    raise ConfigError(
        f"--experts_implementation {wanted}: experts with an adapter support only {only}, or expert by "
        "expert if torch has no grouped product: leave it out"
    )


def choose_experts(language_model: nn.Module, wanted: str | None, device: torch.device, compiled: bool) -> str:
    """Set the implementation of experts to `wanted`, or to transformers' choice if None. Returns a line for the log."""
    if wanted is not None:
        language_model.set_experts_implementation(wanted)
    chosen, weight = language_model.config._experts_implementation, next(language_model.parameters())
    way = IMPLEMENTATIONS.get(chosen, chosen)
    if chosen == "grouped_mm":
        old = device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0)
        if old or (compiled and weight.dtype != torch.bfloat16):
            why = "this GPU has no grouped matrix product" if old else "compiled, torch supports it only in bf16"
            way = f"one matrix product after the other ({why})"
    return f"experts: {way} ({chosen})"


class Balance(NamedTuple):
    """Balance of the experts' load, scalars on the device; only aux_loss has a gradient.

    aux_loss: load-balancing loss over all layers, as in transformers, or as in MoE-LLaVA for upcycled models.
    max_over_mean: tokens of the busiest expert divided by the mean over experts. entropy: entropy of the experts' token
    shares, divided by its maximum. The last two are averaged over layers.
    """

    aux_loss: torch.Tensor
    max_over_mean: torch.Tensor
    entropy: torch.Tensor


class Recorder:
    """Modules whose outputs can be recorded in forward."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._seen: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._records = False
        for module in modules:
            module.register_forward_hook(self._record)

    @contextmanager
    def recording(self) -> Iterator[list[tuple[torch.Tensor, torch.Tensor]]]:
        """Record seen_of(output) of every module that runs inside the context.

        Recomputation in backward runs routers again, but outside the context, so it records nothing.
        """
        self._seen, self._records = [], True
        try:
            yield self._seen
        finally:
            self._seen, self._records = [], False

    def _record(self, _module: nn.Module, _inputs: tuple, output: tuple) -> None:
        if self._records:
            self._seen.append(self.seen_of(output))


class Routers(Recorder):
    """Routers of a transformers mixture; records logits or probabilities (T, E) and chosen experts (T, K)."""

    def __init__(self, language_model: nn.Module) -> None:
        self._gives_probabilities = expert_names(language_model.config).gives_probabilities
        recorded = language_model.base_model._can_record_outputs["router_logits"]  # logits, weights, choices
        super().__init__(module for module in language_model.modules() if isinstance(module, recorded.target_class))

    @staticmethod
    def seen_of(output: tuple) -> tuple[torch.Tensor, torch.Tensor]:
        return output[0], output[2]

    def balance(self, seen: list[tuple[torch.Tensor, torch.Tensor]]) -> Balance:
        """Compute the balance of the recorded outputs."""
        # Don't compute this during recording, because a layer's recomputation must save as many tensors as its forward.
        return balance_of([(found.log(), chosen) for found, chosen in seen] if self._gives_probabilities else seen)


class Gates(Recorder):
    """Gates of an upcycled model; records their loss and the number of tokens per expert, (E,)."""

    def __init__(self, language_model: nn.Module) -> None:
        super().__init__(layer.deepspeed_moe.gate for layer in expert_layers(language_model).values())

    @staticmethod
    def seen_of(output: tuple) -> tuple[torch.Tensor, torch.Tensor]:
        return output[0], output[-1]

    @staticmethod
    def balance(seen: list[tuple[torch.Tensor, torch.Tensor]]) -> Balance:
        """Compute the balance. aux_loss: DeepSpeed's, with dropped tokens, summed over layers as in MoE-LLaVA."""
        loads = torch.stack([counts for _, counts in seen]).float()  # (layers, E)
        return _balance(torch.stack([loss for loss, _ in seen]).sum(), loads)


def routers_of(language_model: nn.Module) -> Routers | Gates:
    """Return the recorder of a language model with experts."""
    return Gates(language_model) if is_upcycled(language_model.config) else Routers(language_model)


def balance_of(seen: list[tuple[torch.Tensor, torch.Tensor]]) -> Balance:
    """Compute the balance of Routers' records. Source of aux_loss: transformers' load_balancing_loss_func."""
    rows = sum(len(logits) for logits, _ in seen)
    num_experts = seen[0][0].shape[1]
    numbers = torch.arange(num_experts, device=seen[0][0].device)
    probs = sum(logits.float().softmax(-1).sum(0) for logits, _ in seen)  # (E,)
    loads = torch.stack([(chosen.flatten()[:, None] == numbers).sum(0) for _, chosen in seen]).float()  # (layers, E)
    return _balance(num_experts * (loads.sum(0) / rows).dot(probs / rows), loads)


def _balance(aux_loss: torch.Tensor, loads: torch.Tensor) -> Balance:
    """Compute the balance. loads: tokens per expert, (layers, E)."""
    num_experts, shares = loads.shape[1], loads / loads.sum(1, keepdim=True)
    return Balance(
        aux_loss=aux_loss,
        max_over_mean=(shares.amax(1) * num_experts).mean(),
        entropy=torch.special.entr(shares).sum(1).mean() / math.log(max(2, num_experts)),
    )
