"""All extensions, in the order in which they act: the one place of the core that knows their names."""

from collections.abc import Mapping
from typing import NamedTuple


class Trigger(NamedTuple):
    """What is known of an extension before any file of its folder is read.

    title: its line in --help; flags: names and aliases, one of which loads it by a value that is not its default;
    always: it is loaded whatever its flags say; leaves: files and folders in --output_dir, by name or pattern;
    values: values of the core's flags that ask for it.
    """

    title: str
    flags: str
    always: bool = False
    leaves: str = ""
    values: Mapping[str, tuple[object, ...]] = {}


EXTENSIONS: dict[str, Trigger] = {
    "lora": Trigger(
        "matrices beside the layers train in place of the layers, which may be packed (QLoRA)",
        "lora_enable lora_modules lora_target_modules lora_r lora_alpha lora_rank_pattern "
        "lora_alpha_pattern use_rslora use_dora init_lora_weights modules_to_save lora_dropout lora_bias "
        "lora_weight_path bits quant_type double_quant no_double_quant",
    ),
    "planning": Trigger(
        "the memory and the speed of a run before it starts, and what fits",
        "",
        values={"deepspeed_config": ("auto",), "tokens_per_micro_batch": ("auto",), "dry_run": (True,)},
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
