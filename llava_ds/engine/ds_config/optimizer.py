"""The optimizers that the JSON's optimizer block may name, their states, and the operators that they need."""

from dataclasses import dataclass

from llava_ds.engine.ds_config.draft import Draft
from llava_ds.engine.ds_config.zero import OFFLOADED, offload_device


@dataclass(frozen=True)
class OptimizerFacts:
    """Facts about an optimizer that can't be read from the built object.

    moments: fp32 values that it keeps per parameter, or states of the same size (for Muon, which keeps one for a matrix
    and two for Adam's parameters, the larger number); op, offloaded_op: the operator that DeepSpeed compiles for states
    on the device and in CPU memory; zero_tested: False if it needs zero_allow_untested_optimizer under ZeRO.
    """

    moments: float
    op: str | None = None
    offloaded_op: str | None = None
    zero_tested: bool = False


# DeepSpeed accepts these names in any case; other names must match a class of torch.optim exactly.
DEEPSPEED = {
    "Adam": OptimizerFacts(2, "fused_adam", "cpu_adam", zero_tested=True),
    "AdamW": OptimizerFacts(2, "fused_adam", "cpu_adam", zero_tested=True),
    "Adagrad": OptimizerFacts(1, None, "cpu_adagrad", zero_tested=True),
    "Lamb": OptimizerFacts(2, "fused_lamb"),
    "Lion": OptimizerFacts(1, "fused_lion", "cpu_lion", zero_tested=True),
    "Muon": OptimizerFacts(2, None, "cpu_adam", zero_tested=True),  # the operator is for its Adam part
}
TORCH = {
    **{name: OptimizerFacts(2) for name in ("Adadelta", "Adamax", "NAdam", "RAdam", "Rprop")},
    **{name: OptimizerFacts(1) for name in ("ASGD", "Adafactor", "RMSprop")},
    "SGD": OptimizerFacts(0),
}
# bitsandbytes' optimizers, passed to DeepSpeed as objects. They keep two 8-bit states with a scale per 256 numbers.
BITSANDBYTES = {name: OptimizerFacts(2 * (1 + 4 / 256) / 4) for name in ("AdamW8bit", "PagedAdamW8bit")}
# Other names of these optimizers: Hugging Face's, and bitsandbytes' Adam (it equals AdamW in version 0.50).
EIGHT_BIT_NAMES = {
    **dict.fromkeys(("adamw8bit", "adam8bit", "adamw_8bit", "adamw_bnb_8bit", "adam_8bit"), "AdamW8bit"),
    **dict.fromkeys(("pagedadamw8bit", "pagedadam8bit", "paged_adamw_8bit", "paged_adam_8bit"), "PagedAdamW8bit"),
}
OPTIMIZERS = DEEPSPEED | TORCH | BITSANDBYTES
MORE_MOMENTS = ("amsgrad", "centered")  # each adds one number per parameter
# Optimizers whose updates depend on more than each weight's own gradient, so ZeRO's flat shards change them.
SHARDED = {"Lamb": "a layer's norm", "Adafactor": "a matrix's rows and columns"}
WITH_ADAM = ("Adam", "AdamW", "Muon")


def offloads(draft: Draft) -> bool:
    """True if the optimizer's states are in CPU memory or on NVMe."""
    return offload_device(draft.config, "offload_optimizer") != "none"


def optimizer_name(block: dict) -> str:
    """Return the optimizer's type in the spelling of DEEPSPEED, BITSANDBYTES or torch.optim."""
    written = block["type"].lower()
    return EIGHT_BIT_NAMES.get(written) or next((name for name in DEEPSPEED if name.lower() == written), block["type"])


def num_moments(config: dict) -> float:
    """Return how many fp32 numbers per parameter the resolved JSON's optimizer keeps (default: torch's AdamW)."""
    block = config.get("optimizer", {"type": "AdamW"})
    name, params = optimizer_name(block), block.get("params", {})
    more = [key for key in MORE_MOMENTS if params.get(key)]
    if name in ("SGD", "RMSprop") and params.get("momentum"):
        more.append("momentum")
    return OPTIMIZERS[name].moments + len(more)


# JSON key -> flags
FROM_FLAGS = {
    "lr": ("learning_rate",),
    "weight_decay": ("weight_decay",),
    "betas": ("adam_beta1", "adam_beta2"),
    "eps": ("adam_epsilon",),
}


def kernel_of(name: str, params: dict, offload: bool) -> str | None:
    """Return the operator that DeepSpeed compiles for an optimizer, or None."""
    if name in WITH_ADAM and params.get("torch_adam") is True:
        return None
    return OPTIMIZERS[name].offloaded_op if offload else OPTIMIZERS[name].op


def kernels_of(config: dict) -> dict[str, str]:
    """Return the DeepSpeed operators that a resolved JSON needs, each with the key that requires it."""
    found, block, devices = {}, config.get("optimizer"), {part: offload_device(config, part) for part in OFFLOADED}
    if block is not None:
        offload = devices["offload_optimizer"] != "none"
        if op := kernel_of(optimizer_name(block), block.get("params", {}), offload):
            found[op] = "zero_optimization.offload_optimizer" if offload else f"optimizer.type {block['type']}"
    for part, device in devices.items():
        if device == "nvme":
            found["async_io"] = f"zero_optimization.{part}.device nvme"
    return found
