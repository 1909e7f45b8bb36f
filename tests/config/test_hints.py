"""Hints at misspelled flags: a slip is mended, a flag of another meaning or kind is never suggested."""

import pytest

from llava_ds.config.other_names import unknown_flags
from llava_ds.config.parsing import build_parser
from llava_ds.constants import did_you_mean, nearest_name

NONE = "run/train.py --help all lists all flags"


@pytest.fixture(scope="module")
def known():
    return {name: action for action in build_parser()._actions for name in action.option_strings}


@pytest.mark.parametrize(
    ("words", "end"),
    [
        # Slips
        ("--learningrate 1e-4", "did you mean --learning_rate?"),
        ("--per_device_train_batchsize 8", "did you mean --per_device_train_batch_size?"),
        ("--save_limit 3", "did you mean --save_total_limit?"),
        ("--data_seeds 4", "did you mean --data_seed?"),
        ("--max_grad_nrom 1", "did you mean --max_grad_norm?"),
        # The same last words, another meaning
        ("--ring_attention 2", NONE),
        ("--eval_batch_size 4", NONE),
        ("--max_run 3", "did you mean --max_run_time?"),
        ("--unfreeze_backbone True", NONE),
        ("--adam_beta3 0.9", NONE),
        ("--top_q 1", NONE),
        ("--bf32 True", NONE),
        # Several
        ("--watchdog 3", "the nearest are --watchdog_start_s, --watchdog_step_s, --watchdog_save_s"),
        # Of another kind
        ("--train_vision_tower True", NONE),
        ("--max_step soon", NONE),
        ("--gradient_clip auto", NONE),
        # Names that people know from elsewhere
        ("--epochs 3", "did you mean --num_train_epochs?"),
        ("--lr 1e-4", "did you mean --learning_rate?"),
        ("--torch_dtype bfloat16", "did you mean --bf16 True or --fp16 True?"),
        ("--vision_select_layer -1", "did you mean --mm_vision_select_layer?"),
        ("--merger_lr -1e-5", "did you mean --mm_projector_lr?"),
        ("--global_batch_size 8", "did you mean --train_batch_size?"),
        ("--meta_path shapes.json", "did you mean --data_path with a mixture of several files?"),
        ("--freeze_vit True", "leave it out, because the tower trains with --unfreeze_mm_vision_tower alone"),
        ("--packing True", "leave it out, because samples are always laid end to end"),
        ("--fsdp full_shard", "leave it out, because DeepSpeed places the model, as its JSON says"),
    ],
)
def test_a_hint_is_close_and_of_the_same_kind(known, words, end):
    (line,) = unknown_flags(words.split(), known)
    assert line == f"unknown flag {words.split()[0].split('=')[0]}: {end}"


@pytest.mark.parametrize(
    ("name", "known", "hint"),
    [
        ("trian", ["train", "trim"], "train"),
        ("SGD8", ["SGD"], None),
        ("sgd", ["SGD", "AdamW"], "SGD"),
        ("min_pixels", ["max_pixels"], None),
        ("disable_cache", ["cache_dir"], None),
        ("freeze_tower", ["unfreeze_tower"], None),
        ("nofreeze_tower", ["freeze_tower"], None),
        ("stage2_bucket", ["stage3_bucket"], None),
        ("iamge", ["image", "images"], "image"),
    ],
)
def test_names_are_compared_word_by_word(name, known, hint):
    assert nearest_name(name, known) == hint
    assert did_you_mean(name, known, "none") == ("none" if hint is None else f"did you mean {hint}?")
