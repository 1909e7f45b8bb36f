"""Liger's fused RMSNorm, rotary positions and SwiGLU instead of transformers' (--use_liger_kernel).

Liger's linear cross-entropy is not used, because it counts targets on the host, and so waits for the device in every
micro-batch. output_loss.py computes the loss without this wait.
"""

import sys
import types

import torch
from torch import nn
from transformers import PreTrainedConfig

from llava_ds.constants import ConfigError
from llava_ds.model.open.probe import VOCABULARY, random_copy, random_inputs, rebuilt
from llava_ds.runtime.tf32 import exact_fp32

FLAG = "--use_liger_kernel"
ROTARY = "apply_rotary_pos_emb"  # name in all transformers families that Liger supports
LOGITS = "the logits"
# Maximum difference from transformers' code, relative to the largest value. Liger's kernels round differently.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}


def use_liger(
    language_model: nn.Module, config: PreTrainedConfig, device: torch.device, dtype: torch.dtype
) -> list[str]:
    """Apply Liger's kernels to a language model, and return lines that report them.

    First, a small random copy has to give the same logits and gradients with and without them, on this device and in
    this precision. Raises ConfigError if it does not, or if Liger has no kernels for the family.
    """
    with exact_fp32():
        worst, where = _largest_difference(config, device, dtype)
    if not worst <= TOLERANCE[dtype]:
        raise ConfigError(
            f"{FLAG}: on a small copy of {config.model_type} in {str(dtype).removeprefix('torch.')}, {where} with "
            f"Liger's kernels differ by {worst:.1e} of the largest from transformers' (rounding is at most "
            f"{TOLERANCE[dtype]:.0e}): train without it"
        )
    counts = replace_kernels(language_model)
    return [
        "Liger's kernels: " + ", ".join(f"{count} {name}" for name, count in counts.items() if count),
        f"on a small copy, {where} differ by {worst:.1e} of the largest from transformers' own",
    ]


def replace_kernels(language_model: nn.Module) -> dict[str, int]:
    """Replace the forwards of this instance's modules only. Returns the number of replacements per kind."""
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN, _apply_liger_kernel_to_instance

    kind = language_model.config.model_type
    if kind not in MODEL_TYPE_TO_APPLY_LIGER_FN:
        known = ", ".join(sorted(MODEL_TYPE_TO_APPLY_LIGER_FN))
        raise ConfigError(f"{FLAG}: Liger has no kernels for language models of the kind {kind}, only for {known}")
    family = vars(sys.modules[type(language_model).__module__])
    before = dict(family)
    before_forwards = {module: module.forward for module in language_model.modules()}
    try:
        _apply_liger_kernel_to_instance(language_model, cross_entropy=False, fused_linear_cross_entropy=False)
        rotary = family.get(ROTARY)
    finally:
        family.update(before)  # otherwise other models of the family, even on a CPU, would use Liger's kernels
    counts: dict[str, int] = {}
    for module, forward in before_forwards.items():
        if module.forward != forward:
            counts[type(module).__name__] = counts.get(type(module).__name__, 0) + 1
    if rotary is not before.get(ROTARY):
        counts["rotary positions"] = sum(_replace_rotary(module, rotary) for module in language_model.modules())
    return counts


def _replace_rotary(module: nn.Module, rotary) -> bool:
    """Make an attention module use another rotary function. Returns False for modules without rotary positions."""
    forward = getattr(module.forward, "__func__", None)
    if not isinstance(forward, types.FunctionType) or ROTARY not in forward.__code__.co_names:
        return False
    names = {**forward.__globals__, ROTARY: rotary}
    own = types.FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
    own.__kwdefaults__ = forward.__kwdefaults__
    module.forward = types.MethodType(own, module)
    return True


def _largest_difference(config: PreTrainedConfig, device: torch.device, dtype: torch.dtype) -> tuple[float, str]:
    """Return the largest difference with and without Liger's kernels, relative to the largest value, and its name."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        drawn = random_copy(config)
        plain, fused = (rebuilt(drawn, dtype).to(device) for _ in range(2))
        inputs = random_inputs(plain)
        targets = torch.randint(0, VOCABULARY, inputs["position_ids"].shape[1:]).to(device)
    replace_kernels(fused)
    results = []
    for model in (plain, fused):
        logits = model(**inputs).logits[0]
        nn.functional.cross_entropy(logits.float(), targets).backward()
        gradients = {f"the gradients of {name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
        results.append({LOGITS: logits.detach(), **gradients})
    # Some gradients, like a key bias's, are only rounding errors: divide by at least a tenth of the largest gradient.
    least = torch.stack([g.abs().max() for g in gradients.values()]).max() / 10
    differences = {
        name: ((results[1][name] - wanted).abs().max() / torch.maximum(wanted.abs().max(), least)).item()
        for name, wanted in results[0].items()
    }
    where = max(differences, key=lambda name: (differences[name] != differences[name], differences[name]))
    return differences[where], where
