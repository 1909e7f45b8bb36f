"""Register --deepspeed_config auto, --tokens_per_micro_batch auto and --dry_run."""

from llava_ds.extensions.base import Extension
from llava_ds.extensions.planning.auto import choose_for_ranks, choose_tokens_per_micro_batch
from llava_ds.extensions.planning.dry_run import show_dry_run

extension = Extension(
    choices={
        "deepspeed_config": choose_for_ranks,
        "tokens_per_micro_batch": choose_tokens_per_micro_batch,
        "dry_run": show_dry_run,
    }
)
