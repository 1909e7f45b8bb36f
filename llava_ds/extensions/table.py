"""All extensions, in the order in which they act: the one place of the core that knows their names."""

from collections.abc import Mapping
from typing import NamedTuple


class Trigger(NamedTuple):
    """What is known of an extension before any file of its folder is read.

    title: its line in --help; flags: names and aliases, one of which loads it by a value that is not its default;
    always: it is loaded whatever its flags say; leaves: files and folders in --output_dir, by name or pattern;
    model_types: of config.json in folders that it reads, or refuses with a reason; values: values of the core's flags
    that ask for it.
    """

    title: str
    flags: str = ""
    always: bool = False
    leaves: str = ""
    model_types: str = ""
    values: Mapping[str, tuple[object, ...]] = {}


EXTENSIONS: dict[str, Trigger] = {
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
    "ready": Trigger(
        "vision-language models of transformers' own classes, such as Qwen-VL and Gemma",
        model_types="idefics3 smolvlm internvl gemma3 gemma4 qwen2_vl qwen2_5_vl qwen3_vl qwen3_vl_moe qwen3_5 glm4v "
        "glm46v gemma3n gemma4_unified paligemma qwen3_5_moe mllama",
    ),
}
