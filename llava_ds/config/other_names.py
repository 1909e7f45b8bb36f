"""Hints in messages about unknown flags, such as flags of qwen-vl-finetune, ms-swift, TRL, LLaMA-Factory and
DeepSpeed-Chat, and about models that are not on this machine."""

import argparse
import re
from collections.abc import Iterable, Iterator, Mapping

from llava_ds.config.bounds import takes
from llava_ds.config.other_trainers import WITHOUT_EFFECT
from llava_ds.constants import nearest_name
from llava_ds.extensions.active import flags_class
from llava_ds.extensions.table import EXTENSIONS

MOST_RELATED = 4  # maximum number of flags in a hint; more would not help


def by_name(names: Mapping[str, str]) -> dict[str, str]:
    """Invert a mapping from texts to flag names. Each value is a string of names separated by spaces."""
    return {name: said for said, together in names.items() for name in together.split()}


# Our flags -> other trainers' names for them that are less similar to the right flag than to another one.
ELSEWHERE = by_name(
    {
        "--data_path": (
            "--dataset --dataset_config --dataset_dir --dataset_name --dataset_path --dataset_use --train_data"
        ),
        "--max_pixels": "--image_max_pixels",
        "--min_pixels": "--image_min_pixels",
        "--frames_upbound": "--video_max_frames --video_maxlen --fps_max_frames --max_frames --num_frames",
        "--force_sample True --frames_upbound (a number of frames for every video)": "--video_min_frames --nframes",
        "--video_fps (frames of a second)": "--base_interval",
        "--data_path with a mixture of several files": "--meta_path --sft_only_data_path",
        "--data_split": "--dataset_split --dataset_train_split",
        "--eval_data_split": "--dataset_test_split --eval_split",
        "--image_folder": "--media_dir --image_dir --image_path --image_root --images",
        "--mm_vision_tower_lr": "--vision_tower_learning_rate --vision_tower_lr --vit_lr",
        "--mm_projector_lr": "--aligner_lr --merger_lr --mm_projector_learning_rate --projector_lr",
        "--vision_tower": "--image_tower --vision_encoder --mm_vision_encoder",
        "--mm_projector_type": "--image_projector_type",
        "--eval_fraction": "--val_size --val_split",
        "--model_max_length": "--cutoff_len --max_len --max_length --max_seq_len --max_seq_length --seq_len",
        "--version": "--template --conv_style --conv_type --conversation_template --chat_template",
        "--unfreeze_topk_llm": "--freeze_trainable_layers",
        "--resize_token_embeddings": "--resize_vocab",
        "--resize_token_embeddings True (for tokens that the tokenizer's files have)": (
            "--add_tokens --add_special_tokens --new_special_tokens"
        ),
        "--resize_token_embeddings True --pad_embeddings_to_multiple_of 32": "--resize_token_embeddings_to_32x",
        "--pad_embeddings_to_multiple_of": "--pad_vocab_size_to_multiple_of --make_vocab_size_divisible_by",
        "--eval_steps": "--eval_every --eval_interval",
        "--save_steps": "--save_every --save_interval",
        "--logging_steps": "--log_interval",
        "--num_train_epochs": "--epoch --epochs --num_epochs",
        "--max_grad_norm": "--grad_clip --gradient_clipping",
        "--dataloader_num_workers": "--num_workers",
        "--freeze_backbone": "--freeze_language_model --freeze_llm",
        "--lr_scheduler_type": "--scheduler",
        "the variable WANDB_PROJECT": "--wandb_project",
        "--output_dir": "--output_path --checkpoint_dir",
        "--output_dir (its folder run/tensorboard)": "--tensorboard_path --logging_dir",
        "--resume": "--resume_from_checkpoint",
        "--resume never": "--overwrite_output_dir",
        "--optim (or an optimizer in the DeepSpeed JSON)": "--optimizer",
        '"stage" in the DeepSpeed JSON (--deepspeed_config ds_configs/zero2.json)': "--deepspeed_stage --zero_stage",
        "--deepspeed_config ds_configs/zero2_offload.json": "--offload",
        "--model_name_or_path": "--model --model_path --sft_model_path",
        "--learning_rate": "--lora_learning_rate --lr",
        "--gradient_checkpointing": "--activation_checkpointing --recompute",
        "--per_device_train_batch_size": (
            "--batch_size --micro_batch_size --per_device_training_batch_size --per_gpu_train_batch_size"
        ),
        "--train_batch_size": "--global_batch_size",
        "--warmup_steps": "--num_warmup_steps",
        "--bf16 True or --fp16 True": "--dtype --mixed_precision --precision --torch_dtype",
        "--cache_dir": "--data_output_path",
        "--report_to tensorboard": "--enable_tensorboard",
        "the variable DEEPSPEED_TIMEOUT (minutes)": "--ddp_timeout",
    }
)

# Reasons why flags of other trainers are not needed here -> these flags.
NOT_HERE = by_name(
    {
        "the tower trains with --unfreeze_mm_vision_tower alone": "--freeze_vision_tower --freeze_vit",
        "nothing is padded": "--num_padding_at_beginning",
        "samples are always laid end to end": "--data_flatten --data_packing --packing --packing_length",
        "the fastest attention that this machine has is chosen": "--flash_attn --use_flash_attn --attn",
        "DeepSpeed places the model, as its JSON says": "--device_map --fsdp --fsdp_config",
        "columns that a layout does not have are never read": "--remove_unused_columns",
        "run/train.py trains, and run/evaluate.py evaluates": "--do_train --do_eval --do_predict",
        "losses are always computed in float32": "--compute_fp32_loss",
        "the template of --version ends every answer": "--add_eot_token",
        "every loss is logged": "--print_loss",
        "the eval loss is the mean over all eval samples": "--eval_iters",
        "language models use the dropout of their config.json, usually none": "--disable_dropout --dropout",
    }
)


def unknown_flags(unknown: list[str], known: Mapping[str, argparse.Action | None]) -> Iterator[str]:
    """Yield a line with a hint for every unknown flag. unknown: the arguments that the parser did not accept; known:
    all options and their actions, None for options of another parser."""
    after_flag = False
    sections = list(map(flags_class, EXTENSIONS))
    elsewhere = ELSEWHERE | {name: ours for each in sections for name, ours in by_name(each.other_names).items()}
    not_here = NOT_HERE | {name: why for each in sections for name, why in by_name(each.not_here).items()}
    for token, after in zip(unknown, [*unknown[1:], "--"]):
        flag, has_value, value = token.partition("=")
        if not flag.startswith("-") or (after_flag and _is_number(flag)):
            if not after_flag:
                yield f"unexpected argument {flag!r}: every value needs a --flag before it"
            continue
        after_flag = "=" not in token
        if flag in not_here:
            yield f"unknown flag {flag}: leave it out, because {not_here[flag]}"
            continue
        value = value if has_value else after
        useful = {name: action for name, action in known.items() if name.removeprefix("--") not in WITHOUT_EFFECT}
        fitting = [name for name, action in useful.items() if action is None or takes(action, value)]
        nearest = elsewhere.get(flag) or nearest_name(flag, fitting)
        hint = (
            f"did you mean {nearest}?" if nearest else related(flag, fitting, "run/train.py --help all lists all flags")
        )
        yield f"unknown flag {flag}: {hint}"


def related(flag: str, known: Iterable[str], otherwise: str) -> str:
    """Return a hint with the known flags that share words with an unknown flag, or `otherwise` if there are none.

    A known flag is related if it begins with all words of the unknown flag, or if both have the same number of words,
    at least three, the same first word, and only one different word.
    """
    words = _words(flag)
    others = {each: _words(each) for each in known if each.startswith("--") and "-" not in each[2:]}
    found = [each for each, own in others.items() if own[: len(words)] == words]
    same = {each: own for each, own in others.items() if len(own) == len(words) > 2 and own[0] == words[0]}
    found += [each for each, own in same.items() if len(set(own) & set(words)) == len(words) - 1]
    return f"the nearest are {', '.join(found)}" if 0 < len(found) <= MOST_RELATED else otherwise


def _words(flag: str) -> list[str]:
    return flag.strip("-").lower().replace("-", "_").split("_")


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def hub_hint(*paths: str) -> str:
    """Return the end of a message about missing model folders: commands to download those that look like hub names."""
    names = [path for path in paths if re.fullmatch(r"[\w-]+/[\w.-]+", path)]
    loads = " && ".join(f"hf download {name} --local-dir models/{name.split('/')[1]}" for name in names)
    return f"; if it is a name on the hub, download it ({loads}) and give that folder" if names else ""
