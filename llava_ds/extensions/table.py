"""All extensions, in the order in which they act: the one place of the core that knows their names."""

from collections.abc import Mapping
from typing import NamedTuple


class Trigger(NamedTuple):
    """What is known of an extension before any file of its folder is read.

    title: its line in --help; flags: names and aliases, one of which loads it by a value that is not its default;
    always: it is loaded whatever its flags say; leaves: files and folders in --output_dir, by name or pattern;
    values: values of the core's flags that ask for it; schemes: of URLs that it reads, or * for all;
    requires: names of extensions that it needs. One without flags and values has scripts in run/.
    """

    title: str
    flags: str
    always: bool = False
    leaves: str = ""
    values: Mapping[str, tuple[object, ...]] = {}
    schemes: str = ""
    requires: str = ""


EXTENSIONS: dict[str, Trigger] = {
    "planning": Trigger(
        "the memory and the speed of a run before it starts, and what fits",
        "",
        values={"deepspeed_config": ("auto",), "tokens_per_micro_batch": ("auto",), "dry_run": (True,)},
    ),
    "object_store": Trigger(
        "data by URLs, in object stores and on web servers",
        "allow_http object_cache_dir object_cache_gb",
        always=True,
        schemes="*",
    ),
    "streaming": Trigger("training begins while the data are encoded", "stream shuffle_buffer_size"),
    "infer": Trigger("answers of a model, in the terminal, in a browser and to other programs", ""),
    "benchmarks": Trigger("scores on benchmarks, also while a run trains", "eval_tasks", requires="infer"),
    "doctor": Trigger("whether a machine and its software can train", ""),
    "best": Trigger(
        "the checkpoint with the best evaluation is kept, or becomes the model",
        "metric_for_best_model greater_is_better load_best_model_at_end "
        "early_stopping_patience early_stopping_threshold",
    ),
    "samples": Trigger(
        "a few questions are answered while the run trains",
        "sample_steps num_sample_questions sample_max_new_tokens sample_data_path",
        leaves="samples.jsonl",
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
