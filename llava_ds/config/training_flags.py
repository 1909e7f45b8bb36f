"""Flags of training: steps, optimizer, precision, eval, logging, checkpoints and failures."""

from dataclasses import dataclass
from typing import Annotated, Literal

from llava_ds.config.bounds import (
    MOST,
    Bounds,
    Count,
    Part,
    PartBelowOne,
    Positive,
    Rate,
    Seconds,
    Seed,
    Whole,
)
from llava_ds.config.flags import flags_of

# Values of --report_to; packages and extras have the same names.
TRACKERS = ("tensorboard", "wandb", "trackio")

# Hugging Face's values of --optim -> the names used here. Several values may be synonyms.
OPTIMS = {
    **dict.fromkeys(("adamw_torch", "adamw_torch_fused"), "adamw_torch"),
    **dict.fromkeys(("adamw_8bit", "adamw_bnb_8bit"), "adamw_8bit"),
    "paged_adamw_8bit": "paged_adamw_8bit",
}

# Functions that declare flags of a group; the ones named _free declare flags that a resumed run may change freely.
_run, _run_free = flags_of("run")
_objective, _ = flags_of("objective")
_steps, _ = flags_of("steps")
_optimizer, _ = flags_of("optimizer")
_speed, _speed_free = flags_of("speed")
_order, _ = flags_of("order")
_, _failures_free = flags_of("failures")
_, _eval_free = flags_of("eval")
_logging, _logging_free = flags_of("logging")
_checkpoints, _checkpoints_free = flags_of("checkpoints")


@dataclass(frozen=True)
class TrainingArguments:
    """Flags for training, and for the files that the run writes."""

    deepspeed_config: str | None = _run_free(
        None,
        "DeepSpeed JSON; every value 'auto' is filled from the flags. auto: the fastest of ds_configs/ in which the "
        "run fits, as run/estimate.py predicts (./auto names a file).",
        aliases=("--deepspeed",),
        path="file",
        only_to_train=True,
    )
    output_dir: str | None = _run_free(
        None, "Folder for everything that the run writes.", path="output", only_to_train=True
    )
    plugin: str | None = _run(
        None,
        "Python files with your own extensions (docs/plugins.md). Their code is run.",
        path="unchecked",
        argparse={"nargs": "+", "action": "extend"},
    )
    check_plugin: bool = _run_free(
        True, "Before the first step, check packing, gradients, stored modules and logits of plugins (docs/plugins.md)."
    )
    objective: str = _objective("sft", "sft: the answers of conversations.", argparse={"choices": ["sft"]})
    num_train_epochs: Annotated[float, Bounds(0, 10**6, above=True)] = _steps(1.0, "Passes over the data.")
    max_steps: Whole = _steps(-1, "Optimizer steps; above 0 it overrides --num_train_epochs, 0 or less does not.")
    per_device_train_batch_size: Count = _steps(8, "Samples per rank and micro-batch.", resume="layout")
    gradient_accumulation_steps: Count = _steps(1, "Micro-batches per optimizer step.", resume="layout")
    train_batch_size: Count | None = _steps(
        None,
        "Samples per optimizer step over all ranks. If given, accumulation is computed from it, so that the run is "
        "the same on any number of ranks; --per_device_train_batch_size is then an upper bound.",
    )
    tokens_per_micro_batch: Count | str | None = _steps(
        None,
        "Distribute the samples of an optimizer step over ranks and micro-batches of at most this many tokens, "
        "balanced, instead of by count. auto: as many as memory has room for and a step needs; none: by count. It "
        "changes the layout only: the step's loss and gradient stay the same.",
        resume="layout",
    )
    steps_across_epochs: bool | None = _steps(
        None,
        "If the samples don't divide into steps, do as LLaVA's trainer: let a step continue into the next epoch "
        "instead of ending the epoch with a smaller step, fill ranks up with the epoch's first samples, and drop the "
        "rest at the end. Absent: only with --loss_reduction micro_batch, as for LLaVA's curves.",
    )
    optim: str = _optimizer(
        "adamw_torch",
        "adamw_torch: torch's AdamW; adamw_8bit (adamw_bnb_8bit): bitsandbytes' AdamW with 8-bit states; "
        "paged_adamw_8bit: the same with states that leave the GPU when memory runs out. Others are named by the "
        "DeepSpeed JSON (docs/optimizers.md).",
    )
    learning_rate: Rate = _optimizer(2e-5, "Peak learning rate.")
    mm_projector_lr: Rate | None = _optimizer(None, "Peak learning rate of the projector, if different.")
    mm_vision_tower_lr: Rate | None = _optimizer(None, "Peak learning rate of the vision tower, if different.")
    weight_decay: Rate = _optimizer(0.0, "Weight decay; never applied to biases and norms.")
    adam_beta1: PartBelowOne = _optimizer(0.9, "AdamW beta 1.")
    adam_beta2: PartBelowOne = _optimizer(0.999, "AdamW beta 2.")
    adam_epsilon: Rate = _optimizer(1e-8, "AdamW epsilon.")
    max_grad_norm: Rate = _optimizer(0.0, "Clip the gradient to this norm; 0 does not clip (LLaVA-1.5).")
    warmup_ratio: Part = _optimizer(0.0, "Fraction of all steps in which the rate rises from 0, rounded up.")
    warmup_steps: Annotated[float, Bounds(0, MOST)] = _optimizer(
        0.0,
        "Steps in which the rate rises from 0, or below 1 their fraction of all steps; above 0 it overrides "
        "--warmup_ratio.",
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
    ] = _optimizer(
        "cosine", "Learning-rate schedule, as transformers defines it. A scheduler in the DeepSpeed JSON replaces it."
    )
    lr_scheduler_kwargs: str | None = _optimizer(
        None, 'More arguments of the schedule, as JSON, like {"num_cycles": 2}.'
    )
    loss_reduction: Literal["token", "micro_batch"] = _steps(
        "token",
        "token: mean over all supervised tokens of the step; micro_batch: LLaVA's mean of micro-batch means, over the "
        "steps of its trainer (--steps_across_epochs).",
    )
    bf16: bool = _speed(False, "Train in bfloat16 with fp32 master weights.")
    fp16: bool = _speed(False, "Train in float16 with loss scaling (needs a GPU).")
    tf32: bool = _speed(
        False,
        "Allow TF32 for fp32 matrix products and convolutions on CUDA: faster, with 10 bits of mantissa. Export's "
        "comparison never uses it.",
    )
    deterministic: bool = _speed_free(
        False,
        "Use GPU kernels that give the same bits every time, so that a resumed run equals an uninterrupted one bit "
        "for bit. Slower; operations without such a kernel are refused. CPUs don't need the flag.",
    )
    # Free on a resume, because recomputation changes no result and a run may have run out of memory.
    gradient_checkpointing: str = _speed_free(
        "off",
        "Activation checkpointing: layers of the language model (and of a tower that trains) whose activations are "
        "recomputed in backward instead of stored. off (False); all (True); auto: as few layers as memory allows, "
        "measured with the largest micro-batch before the first step.",
        argparse={"nargs": "?", "const": "all"},
    )
    gradient_checkpointing_every_n_layers: Count = _speed_free(
        1, "With --gradient_checkpointing all: checkpoint every n-th layer only."
    )
    activation_memory_gb: Positive | None = _speed_free(
        None,
        "GB (10^9 bytes) per device for the activations of a micro-batch, for --gradient_checkpointing auto and "
        "--tokens_per_micro_batch auto. Absent: all free memory. For a GPU that is shared.",
    )
    seed: Seed = _optimizer(42, "Seed of initialisation and dropout.")
    data_seed: Seed | None = _order(None, "Seed of the sample order. Absent: --seed.")
    watchdog_start_s: Seconds = _failures_free(
        1800.0,
        "Before the first step: end the run, and name the slowest rank, after this many seconds without progress on "
        "any rank (0: never).",
    )
    watchdog_step_s: Seconds = _failures_free(
        480.0,
        "Likewise for an optimizer step. A step may also take four times the longest so far, and the first step "
        "--watchdog_start_s. Stay below DEEPSPEED_TIMEOUT (10 minutes), after which NCCL ends a rank without naming "
        "it.",
    )
    watchdog_save_s: Seconds = _failures_free(1800.0, "Likewise for a save, and for the export at the end.")
    eval_strategy: Literal["no", "steps", "epoch"] | None = _eval_free(
        None,
        "When to compute the eval loss (of --eval_data_path or --eval_fraction), in addition to the end of the run. "
        "steps: every --eval_steps; epoch: after every epoch; no: only at the end. Absent: steps if --eval_steps is "
        "given, else no.",
        aliases=("--evaluation_strategy",),
    )
    eval_steps: Rate | None = _eval_free(
        None,
        "Optimizer steps between evals; below 1 a fraction of all steps, rounded up. Absent or 0: only at the end, or "
        "with --eval_strategy steps: --logging_steps.",
    )
    logging_steps: Count = _logging(1, "Optimizer steps between reads of the loss from the device.", resume="rewind")
    report_to: str | None = _logging_free(
        None,
        "Trackers for the curves, in addition to metrics.jsonl, metrics.csv and loss.png (always written): any of "
        "tensorboard, wandb and trackio (each needs the extra of its name), all that are installed, or none. Absent: "
        "tensorboard, if it is installed.",
        argparse={"nargs": "*"},
    )
    run_name: str | None = _run_free(
        None, "Name of the run, in the trackers and in report.html. Absent: the name of --output_dir."
    )
    verbose: bool = _run_free(
        False,
        "Show the details of the start (DeepSpeed JSON as filled in, lengths of samples, weights, attention kernel), "
        "and all messages of DeepSpeed, transformers and Python's warnings, on every rank.",
        aliases=("--verbose_logging",),
    )
    save_strategy: Literal["steps", "epoch", "no"] = _checkpoints_free(
        "steps",
        "steps: a checkpoint every --save_steps and one at the end; epoch: one after every epoch and one at the end; "
        "no: none.",
    )
    save_only_model: bool = _checkpoints_free(
        False,
        "Save the model alone, as the folder that the finished run exports, without optimizer states: small "
        "checkpoints that open like an exported model, but can't be resumed from.",
    )
    save_steps: Count = _checkpoints(
        500, "Optimizer steps between checkpoints; --save_strategy no saves none.", resume="rewind"
    )
    save_total_limit: Count | None = _checkpoints_free(None, "Number of checkpoints to keep. Absent: all.")
    async_save: bool = _checkpoints_free(
        False,
        "Write checkpoints in the background while training continues, from a copy in host memory that is as large as "
        "the rank's part of the checkpoint.",
    )
    max_skipped_steps: Count = _failures_free(
        20,
        "End the run after this many consecutive steps without an update because loss or gradients are not finite. "
        "--fp16 finds its loss scale by such steps.",
    )
    max_run_time: str | None = _run_free(
        None,
        "Time limit from the start, like 3h50m, 90s or 5400 (seconds): before it, save and exit with code 75. "
        "Absent: no limit. The same command resumes, unless the saved files can't be resumed from "
        "(--save_only_model, --save_strategy no): exit code 79.",
    )
    resume: str = _run_free(
        "auto",
        "auto: resume from the newest whole checkpoint in --output_dir; a checkpoint's path; never. The number of "
        "ranks and the ZeRO stage may differ from the checkpoint's.",
        path="unchecked",
    )
    allow_changed_flags: str | None = _run_free(
        None,
        "Resume from a checkpoint although these flags (names separated by commas, or all) differ from the ones it "
        "was trained with. The changes are printed, and the new values apply from there.",
    )
    export_format: Literal["hf", "llava"] = _checkpoints_free(
        "hf",
        "Format of the finished model: hf, for transformers; llava, for LLaVA's own code. Absent: hf, or llava where "
        "transformers has no class for such a model.",
    )
    check_export: Literal["full", "sample", "off"] = _checkpoints_free(
        "full",
        "Check of the finished model: the library for it opens the folder and computes one of the run's samples (its "
        "logits must equal training's), and every tensor is read again. full: all positions; sample: the first 64 "
        "(finds the same mistakes, because each position uses all weights, and is faster for a large model on a "
        "CPU); off: no check.",
    )
    max_shard_size: str = _checkpoints_free("5GB", "Largest file of the finished model's weights, like 5GB or 200MB.")
    dry_run: bool = _run_free(
        False,
        "Check everything, then stop before the model is built: prints the plan, the first batch, the memory needed "
        "and, in the last line, whether the run can start and fits. Writes nothing to --output_dir.",
    )


def steps_go_across_epochs(training: TrainingArguments) -> bool:
    """True if samples are divided into steps as in LLaVA's trainer (see --steps_across_epochs)."""
    if training.steps_across_epochs is None:
        return training.loss_reduction == "micro_batch"
    return training.steps_across_epochs
