"""Flags of training: steps, optimizer, precision, eval, logging, checkpoints and failures."""

from dataclasses import dataclass
from typing import Annotated, Literal

from llava_ds.config.bounds import (
    MOST,
    Bounds,
    Count,
    NotNegative,
    Part,
    PartBelowOne,
    Positive,
    Rate,
    Seconds,
    Seed,
    Whole,
)
from llava_ds.config.flags import flag

# The values of --report_to, which are also the names of the packages and of the extras.
TRACKERS = ("tensorboard", "wandb", "trackio")


@dataclass(frozen=True)
class TrainingArguments:
    """Flags of training, and of the files that the run writes."""

    deepspeed_config: str | None = flag(
        None,
        "DeepSpeed JSON; every value 'auto' is filled from the flags. auto: the fastest of ds_configs/ in which the "
        "run fits, as run/estimate.py predicts (./auto names a file).",
        aliases=("--deepspeed",),
        group="run",
        path="file",
        only_to_train=True,
        resume="free",
    )
    output_dir: str | None = flag(
        None,
        "Folder for everything that the run writes.",
        group="run",
        path="output",
        only_to_train=True,
        resume="free",
    )
    num_train_epochs: Annotated[float, Bounds(0, 10**6, above=True)] = flag(1.0, "Passes over the data.", group="steps")
    max_steps: Whole = flag(-1, "Optimizer steps; above 0 it overrides --num_train_epochs.", group="steps")
    per_device_train_batch_size: Count = flag(8, "Samples per rank and micro-batch.", group="steps", resume="layout")
    gradient_accumulation_steps: Count = flag(1, "Micro-batches per optimizer step.", group="steps", resume="layout")
    train_batch_size: Count | None = flag(
        None,
        "Samples per optimizer step over all ranks. If given, accumulation follows from it, so that any number of "
        "ranks gives the same run, and --per_device_train_batch_size is an upper bound.",
        group="steps",
    )
    tokens_per_micro_batch: Count | str | None = flag(
        None,
        "Distribute the samples of an optimizer step over ranks and micro-batches of at most this many tokens, "
        "balanced, in place of by count. auto: as many as memory has room for and a step needs; none: by count. It "
        "changes the layout only: loss and gradient remain those of the step.",
        group="steps",
        resume="layout",
    )
    steps_across_epochs: bool | None = flag(
        None,
        "Where the samples don't divide into steps, as LLaVA's trainer does: let a step continue into the next epoch "
        "in place of ending the epoch with a smaller step, fill ranks up from the epoch's first samples, and drop the "
        "rest at the end. Absent: only with --loss_reduction micro_batch, which also reproduces LLaVA's curves.",
        group="steps",
    )
    learning_rate: Rate = flag(2e-5, "Peak learning rate.", group="optimizer")
    mm_projector_lr: Rate | None = flag(None, "Peak learning rate of the projector, if different.", group="optimizer")
    mm_vision_tower_lr: Rate | None = flag(
        None, "Peak learning rate of the vision tower, if different.", group="optimizer"
    )
    weight_decay: Rate = flag(0.0, "Weight decay; never applied to biases and norms.", group="optimizer")
    adam_beta1: PartBelowOne = flag(0.9, "AdamW beta 1.", group="optimizer")
    adam_beta2: PartBelowOne = flag(0.999, "AdamW beta 2.", group="optimizer")
    adam_epsilon: Rate = flag(1e-8, "AdamW epsilon.", group="optimizer")
    max_grad_norm: Rate = flag(0.0, "Clip the gradient to this norm; 0 does not clip (LLaVA-1.5).", group="optimizer")
    warmup_ratio: Part = flag(
        0.0, "Fraction of all steps in which the rate rises from 0, rounded up.", group="optimizer"
    )
    warmup_steps: Annotated[float, Bounds(0, MOST)] = flag(
        0.0,
        "Steps in which the rate rises from 0, or below 1 their fraction of all steps; above 0 it overrides "
        "--warmup_ratio.",
        group="optimizer",
    )
    lr_scheduler_type: Literal[
        "linear",
        "cosine",
        "cosine_with_restarts",
        "cosine_with_min_lr",
        "cosine_warmup_with_min_lr",
        "polynomial",
        "constant",
        "constant_with_warmup",
        "inverse_sqrt",
        "warmup_stable_decay",
    ] = flag(
        "cosine",
        "Learning-rate schedule, as transformers defines it. A scheduler in the DeepSpeed JSON replaces it.",
        group="optimizer",
    )
    lr_scheduler_kwargs: str | None = flag(
        None, 'More arguments of the schedule, as JSON, like {"num_cycles": 2}.', group="optimizer"
    )
    loss_reduction: Literal["token", "micro_batch"] = flag(
        "token",
        "token: mean over all supervised tokens of the step; micro_batch: LLaVA's mean of micro-batch means, over the "
        "steps of its trainer (--steps_across_epochs).",
        group="steps",
    )
    bf16: bool = flag(False, "Train in bfloat16 with fp32 master weights.", group="speed")
    fp16: bool = flag(False, "Train in float16 with loss scaling (needs a GPU).", group="speed")
    tf32: bool = flag(False, "Allow TF32 matrix products for fp32 on CUDA.", group="speed")
    # Recomputation changes no result: a run that ran out of memory is resumed with other values.
    gradient_checkpointing: str = flag(
        "off",
        "Activation checkpointing: layers of the language model (and of a tower that trains) whose activations are "
        "recomputed in backward in place of stored. off (False); all (True); auto: as few layers as memory allows, "
        "measured with the largest micro-batch before the first step.",
        argparse={"nargs": "?", "const": "all"},
        group="speed",
        resume="free",
    )
    gradient_checkpointing_every_n_layers: Count = flag(
        1, "With --gradient_checkpointing all: checkpoint every n-th layer only.", group="speed", resume="free"
    )
    activation_memory_gb: Positive | None = flag(
        None,
        "GB (10^9 bytes) of each device for the activations of a micro-batch, for --gradient_checkpointing auto and "
        "--tokens_per_micro_batch auto. Absent: all free memory. For a GPU that is shared.",
        group="speed",
        resume="free",
    )
    torch_compile: bool = flag(
        False,
        "Compile the repeated layers of tower and language model with torch.compile (needs a compiler).",
        group="speed",
    )
    torch_compile_backend: str | None = flag(
        None, "Backend of --torch_compile. Absent: torch's default, inductor.", group="speed"
    )
    use_liger_kernel: bool = flag(
        False,
        "Use Liger's fused norms, rotary positions and SwiGLU in the language model (needs a GPU and the extra "
        "llava_ds[liger]), after comparing them with transformers' own on a small copy.",
        group="speed",
    )
    seed: Seed = flag(42, "Seed of initialisation and dropout.", group="optimizer")
    data_seed: Seed | None = flag(None, "Seed of the sample order. Absent: --seed.", group="order")
    watchdog_start_s: Seconds = flag(
        1800.0,
        "Seconds without progress on any rank, before the first step, after which the run is ended and the rank that "
        "is behind is named (0: never).",
        group="failures",
        resume="free",
    )
    watchdog_step_s: Seconds = flag(
        480.0,
        "The same for an optimizer step. A step may also take four times the longest so far, and the first one "
        "--watchdog_start_s. Stay below DEEPSPEED_TIMEOUT (10 minutes), after which NCCL ends a rank without naming "
        "it.",
        group="failures",
        resume="free",
    )
    watchdog_save_s: Seconds = flag(
        1800.0, "The same for a save, and for the export at the end.", group="failures", resume="free"
    )
    eval_strategy: Literal["no", "steps", "epoch"] | None = flag(
        None,
        "When to compute the eval loss (of --eval_data_path or --eval_fraction), beside the end of the run. steps: "
        "every --eval_steps; epoch: after every epoch; no: only at the end. Absent: steps if --eval_steps is given, "
        "else no.",
        aliases=("--evaluation_strategy",),
        group="eval",
        resume="free",
    )
    eval_steps: Rate | None = flag(
        None,
        "Optimizer steps between evals; below 1 a fraction of all steps, rounded up. Absent or 0: only at the end, or "
        "with --eval_strategy steps: --logging_steps.",
        group="eval",
        resume="free",
    )
    sample_steps: Rate | None = flag(
        None,
        "Steps between answers to a few questions, the last of them at the end; below 1 a fraction of all steps, "
        "rounded up (0.1 in the recipes). Absent or 0: none.",
        group="eval",
        resume="free",
    )
    num_sample_questions: Count = flag(
        4, "Number of questions that are answered at --sample_steps.", group="eval", resume="free"
    )
    sample_max_new_tokens: Count = flag(64, "Longest of these answers in tokens.", group="eval", resume="free")
    logging_steps: Count = flag(1, "Steps between readings of the loss.", group="logging", resume="rewind")
    report_to: str | None = flag(
        None,
        "Trackers that get the curves beside metrics.jsonl, metrics.csv and loss.png, which are always written: any of "
        "tensorboard, wandb and trackio (each needs the extra of its name), all that are installed, or none. Absent: "
        "tensorboard, if it is installed.",
        argparse={"nargs": "*"},
        group="logging",
        resume="free",
    )
    run_name: str | None = flag(
        None,
        "Name of the run, in the trackers and in report.html. Absent: the name of --output_dir.",
        group="run",
        resume="free",
    )
    verbose: bool = flag(
        False,
        "Show all messages of DeepSpeed, transformers and Python's warnings, on every rank.",
        aliases=("--verbose_logging",),
        group="run",
        resume="free",
    )
    save_strategy: Literal["steps", "epoch", "no"] = flag(
        "steps",
        "steps: a checkpoint every --save_steps and one at the end; epoch: one after every epoch and one at the end; "
        "no: none.",
        group="checkpoints",
        resume="free",
    )
    save_only_model: bool = flag(
        False,
        "Save the model alone, as the folder that the finished run exports, without optimizer states: small "
        "checkpoints that open like an exported model, but can't be resumed from.",
        group="checkpoints",
        resume="free",
    )
    save_steps: Count = flag(500, "Optimizer steps between checkpoints.", group="checkpoints", resume="rewind")
    save_total_limit: Count | None = flag(
        None, "Number of checkpoints to keep. Absent: all.", group="checkpoints", resume="free"
    )
    async_save: bool = flag(
        False,
        "Write checkpoints in the background while training continues, from a copy in host memory that is as large as "
        "the rank's part of the checkpoint.",
        group="checkpoints",
        resume="free",
    )
    max_skipped_steps: Count = flag(
        20,
        "Consecutive steps with a loss or gradients that are not finite, which change no weights, after which the run "
        "stops. --fp16 searches its loss scale by such steps.",
        group="failures",
        resume="free",
    )
    on_loss_spike: Literal["continue", "rewind"] = flag(
        "continue",
        "Reaction to a jump of the loss. continue: report it; rewind: go back to the weights of the last checkpoint "
        "and skip the samples since then, whose steps remain counted.",
        group="failures",
    )
    loss_spike_sigma: Positive = flag(
        6.0,
        "A loss is a spike when it is this many standard deviations above the mean of the steps before.",
        group="failures",
        resume="rewind",
    )
    loss_spike_window: Annotated[int, Bounds(4, MOST)] = flag(
        128,
        "Number of steps before that a loss is compared with; none is judged before half of them were taken.",
        group="failures",
        resume="rewind",
    )
    check_divergence_steps: NotNegative = flag(
        1000,
        "Steps between comparisons of the weights that every rank holds a copy of: all weights at ZeRO 0 to 2, the "
        "smallest at 3. A difference ends the run with the rank's name. 0: never.",
        group="failures",
        resume="free",
    )
    max_run_time: str | None = flag(
        None,
        "Save and exit with code 75 before this much time has passed since the start, like 3h50m, 90s or 5400 "
        "(seconds). Absent: no limit. The same command resumes, unless what is saved can't be resumed from "
        "(--save_only_model, --save_strategy no): exit code 79.",
        group="run",
        resume="free",
    )
    resume: str = flag(
        "auto",
        "auto: resume from the newest whole checkpoint in --output_dir; a checkpoint's path; never. The number of "
        "ranks and the ZeRO stage may differ from the checkpoint's.",
        group="run",
        path="unchecked",
        resume="free",
    )
    allow_changed_flags: str | None = flag(
        None,
        "Resume from a checkpoint although these flags (names separated by commas, or all) differ from those that it "
        "was trained with. The changes are printed, and the new values count from there on.",
        group="run",
        resume="free",
    )
    export_format: Literal["hf", "llava"] = flag(
        "hf",
        "Format of the finished model: hf, for transformers; llava, for LLaVA's own code. Absent: hf, or llava where "
        "transformers has no class for such a model.",
        group="checkpoints",
        resume="free",
    )
    max_shard_size: str = flag(
        "5GB",
        "Largest file of the finished model's weights, like 5GB or 200MB.",
        group="checkpoints",
        resume="free",
    )
    dry_run: bool = flag(
        False,
        "Check everything, print the plan, the first batch, the memory that is needed and, in the last line, whether "
        "the run can start and fits, and stop before the model is built; nothing is written to --output_dir.",
        group="run",
        resume="free",
    )


def steps_go_across_epochs(training: TrainingArguments) -> bool:
    """True if steps are cut as LLaVA's trainer cuts them (see --steps_across_epochs)."""
    if training.steps_across_epochs is None:
        return training.loss_reduction == "micro_batch"
    return training.steps_across_epochs
