"""All extensions, in the order in which they act: the one place of the core that knows their names."""

from collections.abc import Mapping
from typing import NamedTuple


class Trigger(NamedTuple):
    """What is known of an extension before any file of its folder is read.

    title: its line in --help; flags: names and aliases, one of which loads it by a value that is not its default;
    always: it is loaded whatever its flags say; leaves: files and folders in --output_dir, by name or pattern; keys:
    at the top of the DeepSpeed JSON, that say what a flag says; values: values of the core's flags that ask for it.
    """

    title: str
    flags: str
    always: bool = False
    leaves: str = ""
    keys: str = ""
    values: Mapping[str, tuple[object, ...]] = {}


EXTENSIONS: dict[str, Trigger] = {
    "planning": Trigger(
        "the memory and the speed of a run before it starts, and what fits",
        "",
        values={"deepspeed_config": ("auto",), "tokens_per_micro_batch": ("auto",), "dry_run": (True,)},
    ),
    "sequence_parallel": Trigger(
        "ranks share the tokens of every micro-batch",
        "sequence_parallel_size sp_size",
        keys="sequence_parallel_size",
    ),
    "tensor_parallel": Trigger(
        "ranks share the matrices of the layers",
        "tensor_parallel_size tp_size deepspeed_autotp_size",
        keys="tensor_parallel",
    ),
    "pipeline": Trigger(
        "ranks have some of the layers each",
        "pipeline_parallel_size pp_size",
        keys="pipeline",
    ),
    "liger": Trigger("Liger's fused kernels in the language model", "use_liger_kernel"),
    "mlp_tiles": Trigger("MLPs on some tokens at a time, for long samples", "mlp_tile_tokens"),
    "compile": Trigger("layers compiled by torch.compile", "torch_compile torch_compile_backend"),
    "spikes": Trigger(
        "jumps of the loss, written down or undone",
        "on_loss_spike loss_spike_sigma loss_spike_window",
        always=True,
        leaves="loss_spikes.jsonl",
    ),
    "replicas": Trigger("copies of the weights are compared between ranks", "check_divergence_steps", always=True),
    "ema": Trigger("a moving average of the weights, exported beside the model", "enable_ema ema_decay", leaves="ema"),
}
