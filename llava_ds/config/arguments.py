"""The flags of a training run: LLaVA's and Hugging Face's names, in three frozen sections. parsing.py reads them."""

import dataclasses
from dataclasses import dataclass
from typing import Annotated, Literal

from transformers.hf_argparser import HfArg

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
    Workers,
)
from llava_ds.constants import MAX_IMAGE_PIXELS, PILLOW_MAX_PIXELS


@dataclass(frozen=True)
class ModelArguments:
    """Which model, and which part of it trains."""

    model_name_or_path: str | None = HfArg(
        default=None,
        help="Folder of a causal language model, or of a LLaVA to go on from: in LLaVA's format, in transformers' "
        "(Llava, LlavaNext, LlavaOnevision), or a LoRA adapter; what a LLaVA says of itself is taken for flags that "
        "are not given. Absent: the tiny model that ships with the package.",
    )
    model_base: str | None = HfArg(
        default=None,
        help="Folder of the model that a LoRA adapter in --model_name_or_path belongs to; absent: the one that its "
        "adapter_config.json names.",
    )
    vision_tower: str | None = HfArg(
        default=None,
        help="Folder of the CLIP, SigLIP or SigLIP 2 tower; may be left out for a LLaVA that brings its own, whose "
        "weights win in any case.",
    )
    mm_projector_type: str = HfArg(
        default="mlp2x_gelu",
        help="Projector from tower features to the language model's width: linear, mlpNx_gelu, mlpNx_resMx_gelu, "
        "pooler (one feature of each 2 x 2) or identity.",
    )
    mm_vision_select_layer: Whole = HfArg(
        default=-2, help="Hidden state of the tower that is projected; -1 is the last layer's. Later layers never run."
    )
    mm_vision_select_feature: Literal["patch", "cls_patch"] = HfArg(
        default="patch", help="Project the tower's patches, or CLIP's class token before them, too."
    )
    s2: bool = HfArg(
        default=False, help="Show the tower every picture at several scales and lay their features beside each other."
    )
    s2_scales: str = HfArg(
        default="336,672,1008", help="With --s2: the scales in pixels, multiples of the tower's size, itself first."
    )
    pretrain_mm_mlp_adapter: str | None = HfArg(
        default=None, help="Projector of stage 1 to start from (mm_projector.bin or .safetensors)."
    )
    tune_mm_mlp_adapter: bool = HfArg(
        default=False, help="Stage 1: train the projector only and leave mm_projector.bin."
    )
    freeze_mm_mlp_adapter: bool = HfArg(default=False, help="Leave the projector as it is.")
    freeze_backbone: bool = HfArg(
        default=False, help="Leave the language model as it is, but for its output layer (as in LLaVA)."
    )
    unfreeze_mm_vision_tower: bool = HfArg(default=False, help="Train the vision tower, too.")
    mm_tunable_parts: str | None = HfArg(
        default=None,
        help="What trains, instead of the four flags before: any of mm_vision_tower, mm_mlp_adapter and "
        "mm_language_model, with commas (LLaVA-NeXT).",
    )
    version: str = HfArg(
        default="v1",
        help="Conversation template: plain (stage 1), v1 (Vicuna), llava_v0, llama_2, mistral_instruct, mpt, chatml "
        "(Qwen), llama_3, gemma, phi, or chat_template: the tokenizer's own. LLaVA's names for them are known too.",
    )
    mm_use_im_start_end: bool = HfArg(
        default=False,
        help="Put <im_start> and <im_end> around every picture; a tokenizer without them gets them, with rows that "
        "start as the mean of the others. With --tune_mm_mlp_adapter the input embeddings train, too (as in LLaVA).",
    )
    split_special_tokens: bool = HfArg(
        default=False,
        help="Keep text that spells a special token, like </s> or <|im_end|> in a question, as text; False makes it "
        "the token, as LLaVA does. The templates' own markers are tokens in any case.",
    )
    mm_use_im_patch_token: bool = HfArg(
        default=False, help="Give the tokenizer <im_patch>, too, which stands in no text (as in LLaVA)."
    )
    mm_patch_merge_type: Literal[
        "flat",
        "spatial",
        "spatial_nobase",
        "spatial_unpad",
        "spatial_unpad_nobase",
        "spatial_maxpool2x2",
        "spatial_maxpool2x2_nobase",
        "spatial_unpad_maxpool2x2",
        "spatial_unpad_maxpool2x2_nobase",
    ] = HfArg(
        default="flat",
        help="How the tiles of an anyres picture are read: one after the other, or row by row of the whole picture, "
        "without its padding and with a learned newline after each row (spatial_unpad, LLaVA-NeXT). nobase: without "
        "the overview; maxpool2x2: the largest of each 2 x 2 features, padding and all.",
    )
    lora_enable: bool = HfArg(
        default=False,
        help="Train LoRA beside the linear layers of the language model instead of the layers, and the projector in "
        "full; leaves an adapter that peft and LLaVA open (needs the extra llava_ds[lora]).",
    )
    lora_r: Count = HfArg(default=64, help="Rank of LoRA's matrices (at least 1).")
    lora_alpha: Count = HfArg(default=16, help="LoRA's product counts lora_alpha / lora_r (at least 1).")
    lora_dropout: PartBelowOne = HfArg(default=0.05, help="Part of LoRA's inputs that is dropped (0 to below 1).")
    lora_bias: Literal["none", "all", "lora_only"] = HfArg(
        default="none", help="Biases of the language model that train with LoRA: none, all, or those of its layers."
    )
    lora_weight_path: str | None = HfArg(
        default=None,
        help="Folder of an adapter to start from (peft's or LLaVA's); its non_lora_trainables.bin, if there is one, "
        "is the projector.",
    )
    bits: Literal[16, 8, 4] = HfArg(
        default=16,
        help="Hold the frozen weights beside LoRA in 4 or 8 bits (QLoRA; needs the extra llava_ds[qlora]); "
        "16: as they are.",
    )
    quant_type: Literal["nf4", "fp4"] = HfArg(default="nf4", help="What 4 bits mean.")
    double_quant: bool = HfArg(default=True, help="Quantize the scales of 4-bit weights, too.")


@dataclass(frozen=True)
class DataArguments:
    """Which records and pictures, and how they become tokens."""

    data_path: str | None = HfArg(
        default=None,
        help="Records: LLaVA or ShareGPT JSON, JSONL, OpenAI messages, parquet, a saved datasets folder, a folder with "
        "metadata.jsonl, WebDataset shards (a folder, or a pattern like shard-*.tar), or a YAML mixture of these; "
        "absent: scenes of coloured shapes, generated.",
    )
    data_format: Literal["auto", "llava", "sharegpt", "messages", "caption"] = HfArg(
        default="auto", help="How a record says its conversation; auto looks at the first records and prints it."
    )
    data_columns: str | None = HfArg(
        default=None,
        help="Other names of a record's fields, like conversations=dialog,image=picture (known: id, conversations, "
        "messages, image, video, text, system).",
    )
    image_folder: str | None = HfArg(default=None, help="Folder that the records' image paths are relative to.")
    video_folder: str | None = HfArg(
        default=None, help="Folder that the records' video paths are relative to; absent: --image_folder."
    )
    image_aspect_ratio: str = HfArg(
        default="square",
        help="square: resize the short side and crop the centre; pad: first pad to a square with the mean colour; "
        "original: what the tower's own processor does, which is square for CLIP; anyres: tiles on the best grid of "
        "--image_grid_pinpoints, and an overview; anyres_max_N: the same, its features scaled down to N tiles' worth "
        "(LLaVA-OneVision).",
    )
    image_grid_pinpoints: str | None = HfArg(
        default=None,
        help="Sizes that an anyres picture may take, in pixels, like [(336,672),(672,336)], or a range of grids like "
        "(1x1),...,(6x6), width first; absent: LLaVA-NeXT's five.",
    )
    max_image_pixels: Annotated[int, Bounds(1, PILLOW_MAX_PIXELS)] = HfArg(
        default=MAX_IMAGE_PIXELS,
        help="Pictures with more pixels than this are refused before decoding (at least 1, at most "
        f"{PILLOW_MAX_PIXELS:,}, which is Pillow's own bound).",
    )
    fast_image_decoding: bool = HfArg(
        default=False,
        help="Resize pictures by torch instead of Pillow: some 3 times LLaVA's pictures a second, no value more than 2 "
        "of 255 from the exact one.",
    )
    video_fps: Count = HfArg(default=1, help="Frames taken from a second of a video file (at least 1).")
    frames_upbound: NotNegative = HfArg(
        default=32,
        help="Most frames of a video, taken evenly when there are more; 0 is no limit, LLaVA-NeXT's own default, with "
        "which a long video takes as much memory as it likes.",
    )
    force_sample: bool = HfArg(
        default=False,
        help="Take --frames_upbound frames, evenly spread, of every video file, also of those with fewer by "
        "--video_fps.",
    )
    mm_spatial_pool_stride: Count = HfArg(
        default=2,
        help="Side of the squares of features that are pooled to one in videos (at least 1, which pools nothing).",
    )
    mm_spatial_pool_mode: Literal["average", "max", "bilinear"] = HfArg(
        default="bilinear", help="How features of videos are pooled."
    )
    mm_newline_position: Literal["grid", "frame", "one_token", "no_token"] = HfArg(
        default="grid",
        help="Where a video's features are followed by the learned newline, with --mm_patch_merge_type spatial_unpad…: "
        "after every row, every frame, once, or nowhere.",
    )
    model_max_length: Annotated[int, Bounds(2, MOST)] = HfArg(
        default=2048, help="Longest sample in tokens, image features included (at least 2)."
    )
    supervise_last_turn_only: bool = HfArg(
        default=False, help="Learn the last answer of each conversation only; absent: every answer."
    )
    eval_data_path: str | None = HfArg(
        default=None, help="Samples to measure the loss on, which are not trained on, in any format of --data_path."
    )
    eval_fraction: PartBelowOne = HfArg(
        default=0.0,
        help="Part of the samples (from 0 to below 1) that is held back from training to measure the loss on; "
        "--data_seed draws them.",
    )
    sample_data_path: str | None = HfArg(
        default=None,
        help="Samples whose first questions are answered at --sample_steps, those with images first, in any format of "
        "--data_path; absent: those that are held out, or else those that are trained on.",
    )
    on_unmarked_image: Literal["refuse", "prepend", "text"] = HfArg(
        default="prepend",
        help="What to do about a record with images and no <image> mark in its text. prepend: show them before its "
        "first question; refuse: take it for a bad one; text: train on its text alone, as LLaVA does, and also on that "
        "of a record with marks and no image, which the others take for a bad one.",
    )
    on_bad_sample: Literal["skip", "stop"] = HfArg(
        default="skip",
        help="What to do about records and pictures that can't be used: leave them out, or end the run at the first.",
    )
    max_bad_fraction: Part = HfArg(
        default=0.01, help="End the run when a larger part of the records than this would be left out (0 to 1)."
    )
    shuffle: bool = HfArg(default=True, help="Draw the samples in random order; False keeps the files' order.")
    group_by_modality_length: bool = HfArg(
        default=False, help="Samples of like length and kind (text, pictures) in one step, in the order LLaVA takes."
    )
    group_by_modality_length_auto: bool = HfArg(
        default=False, help="The same in the order that LLaVA-NeXT takes, whose steps are of samples of like length."
    )
    group_by_length: bool = HfArg(
        default=False, help="Samples of like length in one step, in the order that LLaVA-NeXT takes."
    )
    group_by_varlen: bool = HfArg(
        default=False,
        help="Groups of samples of like length, in the order that LLaVA-NeXT takes; they depend on "
        "--gradient_accumulation_steps.",
    )
    group_by_length_bucket: bool = HfArg(
        default=False,
        help="Samples of like length in tokens in one step, every step from one bucket: evener than those above.",
    )
    preprocessing_num_workers: Annotated[int, Bounds(1, 4096)] | None = HfArg(
        default=None, help="Processes that check and encode the data; absent: one per core (at least 1)."
    )
    cache_dir: str = HfArg(
        default="~/.cache/llava_ds",
        help="Folder for encoded data sets, for copies of the pictures that come inside records, and for the generated "
        "scenes. Nodes should share it.",
    )
    dataloader_num_workers: Workers = HfArg(
        default=0, help="Processes per rank that decode pictures (at least 0, which decodes between steps)."
    )


@dataclass(frozen=True)
class TrainingArguments:
    """How it trains, and what it leaves."""

    deepspeed_config: str | None = HfArg(
        default=None,
        aliases=["--deepspeed"],
        help="DeepSpeed JSON; every value 'auto' is filled from the flags. auto: the fastest of ds_configs/ in which "
        "the run fits, by run/estimate.py (./auto names a file).",
    )
    output_dir: str | None = HfArg(default=None, help="Folder for everything that the run leaves.")
    num_train_epochs: Annotated[float, Bounds(0, 10**6, above=True)] = HfArg(
        default=1.0, help="Passes over the data (above 0)."
    )
    max_steps: Whole = HfArg(default=-1, help="Optimizer steps; above 0 it wins over --num_train_epochs.")
    per_device_train_batch_size: Count = HfArg(default=8, help="Samples per rank and micro-batch (at least 1).")
    gradient_accumulation_steps: Count = HfArg(default=1, help="Micro-batches per optimizer step (at least 1).")
    train_batch_size: Count | None = HfArg(
        default=None,
        help="Samples per optimizer step over all ranks (at least 1). Given, accumulation follows from it, so that the "
        "same run results on any number of ranks; --per_device_train_batch_size is then an upper bound.",
    )
    tokens_per_micro_batch: Count | str | None = HfArg(
        default=None,
        help="Lay the samples of an optimizer step on ranks and micro-batches of at most this many tokens, balanced, "
        "instead of by count. auto: as many as memory has room for and a step needs; none: by count. Changes the "
        "layout only: loss and gradient stay those of the step.",
    )
    steps_across_epochs: bool | None = HfArg(
        default=None,
        help="Where the samples don't divide into steps, go on into the next epoch instead of ending with a smaller "
        "step, fill ranks up from the epoch's first samples and leave out what remains at the end: as LLaVA's trainer. "
        "Absent: with --loss_reduction micro_batch, which is for its curves, too.",
    )
    learning_rate: Rate = HfArg(default=2e-5, help="Peak learning rate (0 or more).")
    mm_projector_lr: Rate | None = HfArg(
        default=None, help="Peak learning rate of the projector, if another (0 or more)."
    )
    mm_vision_tower_lr: Rate | None = HfArg(
        default=None, help="Peak learning rate of the vision tower, if another (0 or more)."
    )
    weight_decay: Rate = HfArg(default=0.0, help="Weight decay (0 or more); never on biases and norms.")
    adam_beta1: PartBelowOne = HfArg(default=0.9, help="AdamW beta 1 (0 to below 1).")
    adam_beta2: PartBelowOne = HfArg(default=0.999, help="AdamW beta 2 (0 to below 1).")
    adam_epsilon: Rate = HfArg(default=1e-8, help="AdamW epsilon (0 or more).")
    max_grad_norm: Rate = HfArg(
        default=0.0, help="Clip the gradient to this norm (0 or more); 0 does not clip (LLaVA-1.5)."
    )
    warmup_ratio: Part = HfArg(
        default=0.0, help="Part of all steps in which the rate rises from 0 (0 to 1), rounded up."
    )
    warmup_steps: Annotated[float, Bounds(0, MOST)] = HfArg(
        default=0.0,
        help="Steps in which the rate rises from 0, or below 1 their part of all; above 0 it wins over --warmup_ratio.",
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
    ] = HfArg(
        default="cosine",
        help="Learning-rate schedule, as transformers defines it. A scheduler in the DeepSpeed JSON replaces it.",
    )
    lr_scheduler_kwargs: str | None = HfArg(
        default=None, help='What else the schedule takes, as JSON, like {"num_cycles": 2}.'
    )
    loss_reduction: Literal["token", "micro_batch"] = HfArg(
        default="token",
        help="token: mean over all supervised tokens of the step; micro_batch: LLaVA's mean of micro-batch means, over "
        "its trainer's steps (--steps_across_epochs).",
    )
    bf16: bool = HfArg(default=False, help="Train in bfloat16 with fp32 master weights.")
    fp16: bool = HfArg(default=False, help="Train in float16 with loss scaling (needs a GPU).")
    tf32: bool = HfArg(default=False, help="Allow TF32 matrix products for fp32 on CUDA.")
    gradient_checkpointing: str = HfArg(
        default="off",
        metadata={"nargs": "?", "const": "all"},
        help="Layers of the language model (and of a tower that trains) that run again in backward instead of keeping "
        "what they made: off (False), all (True), or auto: as few as memory allows, which the largest micro-batch "
        "shows before the first step.",
    )
    gradient_checkpointing_every_n_layers: Count = HfArg(
        default=1, help="With --gradient_checkpointing all: recompute every n-th layer only (at least 1)."
    )
    activation_memory_gb: Positive | None = HfArg(
        default=None,
        help="GB (10^9 bytes) of each device that a micro-batch's activations may take, for --gradient_checkpointing "
        "auto and --tokens_per_micro_batch auto; absent: what is free. For a GPU that is shared.",
    )
    torch_compile: bool = HfArg(
        default=False,
        help="Compile the repeated layers of tower and language model with torch.compile (needs a compiler).",
    )
    torch_compile_backend: str | None = HfArg(
        default=None, help="Backend that --torch_compile takes; absent: inductor, as torch has it."
    )
    use_liger_kernel: bool = HfArg(
        default=False,
        help="Use Liger's fused norms, rotary positions and SwiGLU in the language model (needs a GPU and the extra "
        "llava_ds[liger]), after comparing them with transformers' own on a small copy.",
    )
    seed: Seed = HfArg(default=42, help="Seed of initialisation and dropout (0 to 2^32 - 1).")
    data_seed: Seed | None = HfArg(default=None, help="Seed of the sample order (0 to 2^32 - 1); absent: --seed.")
    watchdog_start_s: Seconds = HfArg(
        default=1800.0,
        help="Seconds without any rank getting on, before the first step, after which the run is ended and the rank "
        "that is behind named (0: never).",
    )
    watchdog_step_s: Seconds = HfArg(
        default=480.0,
        help="The same of an optimizer step, which may take four times the longest so far, too, and the first one "
        "--watchdog_start_s. Below DEEPSPEED_TIMEOUT (10 minutes), after which NCCL ends a rank without a name.",
    )
    watchdog_save_s: Seconds = HfArg(default=1800.0, help="The same of saving, and of writing the result.")
    eval_strategy: Literal["no", "steps", "epoch"] | None = HfArg(
        default=None,
        aliases=["--evaluation_strategy"],
        help="When the loss on eval samples (--eval_data_path or --eval_fraction) is measured, beside the end of the "
        "run. steps: every --eval_steps; epoch: after every epoch; no: never before the end. Absent: steps if "
        "--eval_steps is given, else no.",
    )
    eval_steps: Rate | None = HfArg(
        default=None,
        help="Optimizer steps between measurements of the eval loss; below 1 a part of all steps, rounded up. Absent "
        "or 0: at the end only, or with --eval_strategy steps: --logging_steps.",
    )
    sample_steps: Rate | None = HfArg(
        default=None,
        help="Steps between answers to a few questions, the last ones at the end; below 1 a part of all steps, rounded "
        "up (the recipes have 0.1). Absent or 0: none.",
    )
    num_sample_questions: Count = HfArg(default=4, help="Questions that are answered at --sample_steps (at least 1).")
    sample_max_new_tokens: Count = HfArg(default=64, help="Longest of these answers, in tokens (at least 1).")
    logging_steps: Count = HfArg(default=1, help="Steps between readings of the loss (at least 1).")
    report_to: str | None = HfArg(
        default=None,
        metadata={"nargs": "*"},
        help="Where the curves go beside metrics.jsonl, metrics.csv and loss.png, which are always written: some of "
        "tensorboard, wandb and trackio (each needs the extra of its name), all that are installed, or none. Absent: "
        "tensorboard, if it is installed.",
    )
    run_name: str | None = HfArg(
        default=None, help="What the run is called, there and in report.html; absent: the name of --output_dir."
    )
    verbose: bool = HfArg(
        default=False,
        aliases=["--verbose_logging"],
        help="Let DeepSpeed, transformers and Python's warnings say what they have to say, on every rank.",
    )
    save_strategy: Literal["steps", "epoch", "no"] = HfArg(
        default="steps",
        help="steps: a checkpoint every --save_steps and one at the end; epoch: one after every epoch and one at the "
        "end; no: none.",
    )
    save_only_model: bool = HfArg(
        default=False,
        help="Save the model alone, as the folder that the finished run leaves, without optimizer states: small "
        "checkpoints that open like an exported model, and from which no run can be resumed.",
    )
    save_steps: Count = HfArg(default=500, help="Optimizer steps between checkpoints (at least 1).")
    save_total_limit: Count | None = HfArg(default=None, help="Checkpoints to keep (at least 1); absent: all.")
    async_save: bool = HfArg(
        default=False,
        help="Write checkpoints in the background while training goes on, from a copy in host memory, which each rank "
        "needs as much of as it writes.",
    )
    max_skipped_steps: Count = HfArg(
        default=20,
        help="Steps in a row with a loss or gradients that are not finite, which change nothing, after which the run "
        "stops (at least 1). --fp16 looks for its loss scale by such steps.",
    )
    on_loss_spike: Literal["continue", "rewind"] = HfArg(
        default="continue",
        help="When the loss jumps. continue: say so; rewind: go back to the weights of the last checkpoint and pass "
        "over the samples since then, whose steps stay counted.",
    )
    loss_spike_sigma: Positive = HfArg(
        default=6.0,
        help="Standard deviations above the mean of the steps before from which a loss is a spike (above 0).",
    )
    loss_spike_window: Annotated[int, Bounds(4, MOST)] = HfArg(
        default=128, help="Steps before, that a loss is judged by; before half of them nothing is (at least 4)."
    )
    check_divergence_steps: NotNegative = HfArg(
        default=1000,
        help="Steps between comparisons of what every rank holds a copy of: all weights at ZeRO 0 to 2, the smallest "
        "at 3. A difference ends the run with the rank's name. 0: never.",
    )
    max_run_time: str | None = HfArg(
        default=None,
        help="Save and leave, with exit code 75, before this much time has gone by since the start, like 3h50m, 90s or "
        "5400 (seconds); absent: no limit. The same command goes on, unless no run can be resumed from what is saved "
        "(--save_only_model, --save_strategy no): exit code 79.",
    )
    resume: str = HfArg(
        default="auto",
        help="auto: go on from the newest whole checkpoint in --output_dir; a checkpoint's path; never. "
        "The number of ranks and the ZeRO stage may be others than before.",
    )
    allow_changed_flags: str | None = HfArg(
        default=None,
        help="Go on from a checkpoint although these flags (names with commas between, or all) differ from those that "
        "it was trained with. What changed is printed, and the new values count from there on.",
    )
    export_format: Literal["hf", "llava"] = HfArg(
        default="hf",
        help="What the finished model is written as: hf, for transformers; llava, for LLaVA's own code. Absent: hf, or "
        "llava where transformers has no class for such a model.",
    )
    max_shard_size: str = HfArg(default="5GB", help="Largest file of the finished model's weights, like 5GB or 200MB.")
    dry_run: bool = HfArg(
        default=False,
        help="Check everything, print the plan, the first batch, the memory that is needed and, in the last line, "
        "whether the run can start and fits, and stop before the model is built; nothing is left in --output_dir.",
    )


def flag_default(name: str) -> object:
    """What a flag is when nobody gives it; None for a name that is no flag."""
    sections = (ModelArguments, DataArguments, TrainingArguments)
    return next((getattr(section, name) for section in sections if hasattr(section, name)), None)


def steps_go_across_epochs(training: TrainingArguments) -> bool:
    """Whether steps are cut as LLaVA's trainer cuts them (see --steps_across_epochs)."""
    return (
        training.loss_reduction == "micro_batch"
        if training.steps_across_epochs is None
        else training.steps_across_epochs
    )


# The values of --report_to, which are the packages' names and the extras', too.
TRACKERS = ("tensorboard", "wandb", "trackio")

# The names of --mm_tunable_parts, and the parts of the model.
TUNABLE_PARTS = {
    "mm_vision_tower": "vision_tower",
    "mm_mlp_adapter": "projector",
    "mm_language_model": "language_model",
}


def trained_parts(model: ModelArguments) -> frozenset[str]:
    """What trains, of vision_tower, projector, language_model and output_layer (the language model's, by itself).

    Source: LLaVA's and LLaVA-NeXT's train(), whose --freeze_backbone leaves the output layer training.
    """
    if model.mm_tunable_parts is not None:
        named = {name.strip() for name in model.mm_tunable_parts.split(",")}
        return frozenset(part for name, part in TUNABLE_PARTS.items() if name in named)
    parts = {"vision_tower"} if model.unfreeze_mm_vision_tower else set()
    if not model.freeze_mm_mlp_adapter:
        parts.add("projector")
    if not model.tune_mm_mlp_adapter:
        # LoRA freezes all of the language model, so that --freeze_backbone says nothing beside it.
        parts.add("output_layer" if model.freeze_backbone and not model.lora_enable else "language_model")
    return frozenset(parts)


def trains_projector_only(model: ModelArguments) -> bool:
    """Whether this is stage 1, which leaves a projector and no whole model."""
    return trained_parts(model) == {"projector"}


def trains_new_rows(model: ModelArguments) -> bool:
    """Whether stage 1 trains the input embeddings beside the projector, for the tokens around pictures.

    Source: LLaVA's initialize_vision_tokenizer.
    """
    return model.tune_mm_mlp_adapter and model.mm_use_im_start_end


@dataclass(frozen=True)
class Arguments:
    """All sections, and the names of the flags that the user wrote (command line or recipe)."""

    model: ModelArguments
    data: DataArguments
    training: TrainingArguments
    given: frozenset[str]

    def replaced(self, **values: object) -> "Arguments":
        """A copy in which every named flag has another value, in whichever section it is."""
        sections = {}
        for section in ("model", "data", "training"):
            part = getattr(self, section)
            mine = {k: v for k, v in values.items() if k in {f.name for f in dataclasses.fields(part)}}
            sections[section] = dataclasses.replace(part, **mine)
        return dataclasses.replace(self, **sections)

    def as_dict(self) -> dict[str, object]:
        """Every flag and its value."""
        return {**dataclasses.asdict(self.model), **dataclasses.asdict(self.data), **dataclasses.asdict(self.training)}
