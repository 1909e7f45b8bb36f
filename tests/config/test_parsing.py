"""Flags: who wins, what is refused, and that one error tells all of it."""

import dataclasses
import os
import re
import typing
from importlib.util import find_spec
from pathlib import Path

import pytest
from known_flags import known_words

from llava_ds.config.arguments import (
    FLAGS,
    SECTIONS,
    ModelArguments,
    declared_by,
    every_flag,
    every_objective,
    every_section,
    flags_free_on_resume,
    trained_parts,
    trains_projector_only,
)
from llava_ds.config.bounds import Bounds, bounds_of
from llava_ds.config.flags import GROUPS
from llava_ds.config.other_trainers import WITHOUT_EFFECT
from llava_ds.config.parsing import build_parser, parse_arguments, tiny_defaults
from llava_ds.config.recipes import RECIPES, found, read_recipe
from llava_ds.config.rules import is_installed
from llava_ds.constants import ConfigError
from llava_ds.extensions.active import flags_class
from llava_ds.extensions.table import EXTENSIONS
from llava_ds.train.early_flags import read_flags

ZERO2 = str(Path(__file__).parents[2] / "ds_configs" / "zero2.json")
NEEDED = ["--deepspeed_config", ZERO2, "--output_dir", "out"]


@pytest.fixture(autouse=True)
def everything_to_report_to(monkeypatch):
    """LLaVA's scripts report to W&B, which has no part in these tests."""
    for module in ("parsing", "rules"):
        monkeypatch.setattr(f"llava_ds.config.{module}.is_installed", lambda name: True)


def parse(*argv: object, **more):
    return parse_arguments([*NEEDED, *map(str, argv)], **more)[0]


def refused(*argv: object) -> str:
    """The message with which a command line is refused."""
    with pytest.raises(ConfigError) as caught:
        parse_arguments(list(map(str, argv)))
    return str(caught.value)


def recipe(folder: Path, text: str) -> Path:
    path = folder / "recipe.yaml"
    path.write_text(text)
    return path


def test_command_line_wins_over_recipe_and_recipe_over_defaults(tmp_path):
    path = recipe(tmp_path, "learning_rate: 3.0e-3\nwarmup_ratio: 0.1\nmm_vision_select_layer: -1\nbf16: true\n")
    defaults = {"warmup_ratio": 0.5, "adam_beta2": 0.95}
    for placed in (["--recipe", path, "--learning_rate", 1e-4], ["--learning_rate", 1e-4, f"--recipe={path}"]):
        args = parse(*placed, defaults=defaults)
        assert args.training.learning_rate == 1e-4
        assert args.training.warmup_ratio == 0.1
        assert args.training.adam_beta2 == 0.95
        assert args.training.save_steps == 500
        assert args.model.mm_vision_select_layer == -1
        assert args.training.bf16 is True


def test_given_names_what_the_user_wrote_and_nothing_else(tmp_path):
    path = recipe(tmp_path, "learning_rate: 3.0e-3\n")
    args = parse("--recipe", path, "--bf16=True", "--version", "v1", defaults={"seed": 7})
    assert args.given == {"recipe", "learning_rate", "bf16", "version", "deepspeed_config", "output_dir"}
    assert args.training.seed == 7


def test_a_flag_spelled_with_hyphens_is_given_under_its_name():
    args = parse("--train-batch-size", 8, "--tune-mm-mlp-adapter", "True")
    assert args.training.train_batch_size == 8
    assert {"train_batch_size", "tune_mm_mlp_adapter"} <= args.given


def test_deepspeed_is_another_name_for_deepspeed_config():
    args = parse_arguments(["--deepspeed", ZERO2, "--output_dir", "out"])[0]
    assert args.training.deepspeed_config == ZERO2
    assert "deepspeed_config" in args.given and "deepspeed" not in args.given


def test_unknown_flag_names_the_nearest(tmp_path):
    message = refused(*NEEDED, "--learning_rat", 1e-3, "--zzzzzz=1")
    assert "unknown flag --learning_rat: did you mean --learning_rate?" in message
    assert "unknown flag --zzzzzz: run/train.py --help all lists all flags" in message
    message = refused(*NEEDED, "--recipe", recipe(tmp_path, "learn_rate: 1\n"))
    assert "unknown flag --learn_rate: did you mean --learning_rate?" in message


def test_the_value_of_an_unknown_flag_is_no_second_problem():
    assert len(refused(*NEEDED, "--learning_rat", 1e-3).splitlines()) == 1


def test_all_that_is_wrong_with_a_command_line_is_said_at_once():
    message = refused(
        *("--deepspeed_config", ZERO2, "--learning_rat", 1e-3, "--seed", "one", "--lr_scheduler_type", "wavy"),
        *("--save_strategy", "sometimes", "--warmup_steps", -3, "--bits", 4),
    )
    assert [line.split()[:3] for line in message.splitlines()[:4]] == [
        ["--seed", "one", "is"],
        ["--lr_scheduler_type:", "invalid", "choice:"],
        ["--save_strategy:", "invalid", "choice:"],
        ["unknown", "flag", "--learning_rat:"],
    ]
    for problem in ("--output_dir is missing", "--warmup_steps is -3", "--bits"):
        assert problem in message
    assert len(message.splitlines()) == 7


def test_what_may_not_hold_of_the_right_flag_is_not_said():
    """A misspelled flag is not missing, too."""
    [line] = refused("--deepspeed_config", ZERO2, "--output_dri", "out").splitlines()
    assert line == "unknown flag --output_dri: did you mean --output_dir?"


def test_a_flag_is_never_completed_from_its_beginning():
    assert "unknown flag --learning" in refused(*NEEDED, "--learning", 1e-3)


def test_a_value_without_a_flag_is_named():
    assert "unexpected argument 'oops': every value needs a --flag before it" in refused(*NEEDED, "oops")


def test_llavas_pretrain_script_parses_and_names_what_has_no_effect(tmp_path):
    for name in ("vicuna", "clip", "images"):
        (tmp_path / name).mkdir()
    (tmp_path / "data.json").write_text("[]")
    script = f"""
        --deepspeed {ZERO2} --model_name_or_path {tmp_path}/vicuna --version plain --data_path {tmp_path}/data.json
        --image_folder {tmp_path}/images --vision_tower {tmp_path}/clip --mm_projector_type mlp2x_gelu
        --tune_mm_mlp_adapter True --mm_vision_select_layer -2 --mm_use_im_start_end False
        --mm_use_im_patch_token False --bf16 True --output_dir out --num_train_epochs 1
        --per_device_train_batch_size 32 --per_device_eval_batch_size 4 --gradient_accumulation_steps 1
        --evaluation_strategy no --save_strategy steps --save_steps 24000 --save_total_limit 1 --learning_rate 1e-3
        --weight_decay 0. --warmup_ratio 0.03 --lr_scheduler_type cosine --logging_steps 1 --tf32 True
        --model_max_length 2048 --gradient_checkpointing True --dataloader_num_workers 4 --lazy_preprocess True
        --report_to wandb"""
    args, notes = parse_arguments([*script.split(), "--local_rank", "0"])
    assert args.training.per_device_train_batch_size == 32 and args.model.mm_vision_select_layer == -2
    named = {note.split()[0].removeprefix("--") for note in notes}
    assert named == set(WITHOUT_EFFECT) & set(script.replace("--", "").split())
    assert all("has no effect: " in note for note in notes)


# The flags of LLaVA-NeXT's scripts/train/finetune_clip.sh and scripts/video/train/*.sh, but those that train the tower.
NEXT_SCRIPT = """
    --deepspeed {zero2} --model_name_or_path {here}/qwen --version qwen_1_5 --data_path={here}/data.json
    --image_folder {here}/images --video_folder {here}/images --vision_tower {here}/clip --mm_projector_type mlp2x_gelu
    --pretrain_mm_mlp_adapter={here}/mm_projector.bin --mm_vision_select_layer -2 --mm_use_im_start_end False
    --mm_use_im_patch_token False --group_by_modality_length True --image_aspect_ratio anyres_max_9
    --image_grid_pinpoints (1x1),...,(6x6) --mm_patch_merge_type spatial_unpad --bf16 True --run_name name
    --output_dir out --num_train_epochs 1 --per_device_train_batch_size 1 --per_device_eval_batch_size 4
    --gradient_accumulation_steps 2 --evaluation_strategy no --save_strategy steps --save_steps 1000
    --save_total_limit 1 --learning_rate 1e-5 --weight_decay 0. --warmup_ratio 0.03 --lr_scheduler_type cosine
    --logging_steps 1 --tf32 True --model_max_length 32768 --gradient_checkpointing True --dataloader_num_workers 2
    --lazy_preprocess True --report_to wandb --torch_compile False --torch_compile_backend inductor
    --dataloader_drop_last True --frames_upbound 110 --mm_newline_position grid --add_time_instruction False
    --force_sample True --mm_spatial_pool_stride 2 --attn_implementation sdpa --verbose_logging True
    --mm_resampler_type None --mm_vision_select_feature patch --image_crop_resolution 224 --image_split_resolution 224
    --early_mix_text False"""


@pytest.fixture
def next_script(tmp_path) -> list[str]:
    for name in ("qwen", "clip", "images"):
        (tmp_path / name).mkdir()
    for name in ("data.json", "mm_projector.bin"):
        (tmp_path / name).write_text("[]")
    return known_words(NEXT_SCRIPT.format(zero2=ZERO2, here=tmp_path).split())


def test_llava_nexts_scripts_parse_and_name_what_has_no_effect(next_script):
    args, notes = parse_arguments(next_script)
    assert (args.data.frames_upbound, args.data.force_sample) == (110, True)
    named = {note.split()[0].removeprefix("--") for note in notes}
    assert named == {token.removeprefix("--") for token in next_script} & set(WITHOUT_EFFECT)
    assert len(named) > 8


def test_what_llava_nexts_scripts_train_is_known(next_script):
    more = ["--mm_tunable_parts=mm_vision_tower,mm_mlp_adapter,mm_language_model", "--mm_vision_tower_lr=2e-6"]
    args, _ = parse_arguments([*next_script, *more])
    assert trained_parts(args.model) == {"vision_tower", "projector", "language_model"}
    assert args.training.mm_vision_tower_lr == 2e-6


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        ({}, {"projector", "language_model"}),
        ({"tune_mm_mlp_adapter": True}, {"projector"}),
        ({"freeze_mm_mlp_adapter": True}, {"language_model"}),
        ({"freeze_backbone": True}, {"projector", "output_layer"}),
        ({"freeze_backbone": True, "freeze_mm_mlp_adapter": True}, {"output_layer"}),
        ({"unfreeze_mm_vision_tower": True}, {"vision_tower", "projector", "language_model"}),
        ({"unfreeze_mm_vision_tower": True, "tune_mm_mlp_adapter": True}, {"vision_tower", "projector"}),
        ({"mm_tunable_parts": "mm_mlp_adapter"}, {"projector"}),
        ({"mm_tunable_parts": "mm_vision_tower, mm_language_model"}, {"vision_tower", "language_model"}),
    ],
)
def test_what_trains(flags, parts):
    assert trained_parts(ModelArguments(**flags)) == parts
    assert trains_projector_only(ModelArguments(**flags)) == (parts == {"projector"})


def test_the_home_folder_may_be_written_short(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("images", "llama", "clip"):
        (tmp_path / name).mkdir()
    for name, text in (("d.json", "[]"), ("zero.json", "{}"), ("mm.bin", ""), ("r.yaml", "image_folder: ~/images\n")):
        (tmp_path / name).write_text(text)
    flags = {
        "model_name_or_path": "~/llama",
        "vision_tower": "~/clip",
        "pretrain_mm_mlp_adapter": "~/mm.bin",
        "data_path": "~/d.json",
        "video_folder": "~/images",
        "cache_dir": "~/cache",
        "deepspeed_config": "~/zero.json",
        "output_dir": "~/out",
        "resume": "~/out/checkpoint-1",
    }
    args = parse("--recipe", "~/r.yaml", *(token for name, value in flags.items() for token in (f"--{name}", value)))
    values = args.as_dict()
    for name, value in {**flags, "image_folder": "~/images"}.items():
        assert values[name] == value.replace("~", str(tmp_path)), name


@pytest.mark.parametrize(
    ("flag", "value", "instead"),
    [
        ("mm_resampler_type", "perceiver", "None"),
        ("early_mix_text", "True", "False"),
        ("add_time_instruction", "True", "False"),
    ],
)
def test_a_wish_that_can_not_be_met_is_refused(flag, value, instead):
    message = refused(*NEEDED, f"--{flag}", value)
    assert message.startswith(f"--{flag} {value} is not supported (") and message.endswith(f"or give {instead}")


@pytest.mark.parametrize(
    ("flag", "value", "expected"),
    [
        *((name, 0, "give 1 or more") for name in (
            "per_device_train_batch_size", "gradient_accumulation_steps", "train_batch_size", "tokens_per_micro_batch",
            "logging_steps", "save_steps", "save_total_limit", "max_image_pixels",
            "max_skipped_steps",
        )),
        ("eval_fraction", 1, "give a value from 0 to below 1"),
        ("eval_steps", 5, "also give --eval_data_path or --eval_fraction"),
        ("eval_strategy", "epoch", "also give --eval_data_path or --eval_fraction"),
        ("eval_strategy", "steps", "also give --eval_data_path or --eval_fraction"),
        ("eval_steps", 1.5, "give a whole number of steps, or a fraction of all steps, below 1"),
        ("max_run_time", "3 hours", "write it like 3h50m"),
        ("model_max_length", 1, "give 2 or more"),
        ("dataloader_num_workers", -1, "give 0 or more"),
        ("learning_rate", -1.0, "give 0 or more"),
        ("learning_rate", "nan", "give 0 or more"),
        ("mm_projector_lr", "inf", "give 0 or more"),
        ("weight_decay", -0.1, "give 0 or more"),
        ("max_grad_norm", -1.0, "give 0 or more"),
        ("adam_epsilon", -1.0, "give 0 or more"),
        ("adam_beta1", 1.0, "give a value from 0 to below 1"),
        ("adam_beta2", -0.5, "give a value from 0 to below 1"),
        ("warmup_ratio", 1.5, "give a value from 0 to 1"),
        ("num_train_epochs", 0, "give a value above 0"),
        ("num_train_epochs", "inf", "give a value above 0"),
        ("num_train_epochs", "nan", "give a value above 0"),
        *((name, "missing", "no such file") for name in (
            "deepspeed_config", "data_path", "pretrain_mm_mlp_adapter",
        )),
        *((name, "missing", "no such folder") for name in (
            "model_name_or_path", "vision_tower", "image_folder",
        )),
        ("video_folder", "missing", "no such folder"),
        ("video_fps", 0, "give 1 or more"),
        ("frames_upbound", -1, "give 0 or more"),
        ("max_image_pixels", 178_956_971, "give 178,956,970 or less"),
        ("mm_spatial_pool_stride", 0, "give 1 or more"),
        ("preprocessing_num_workers", 0, "give 1 or more"),
        ("max_bad_fraction", 1.5, "give a value from 0 to 1"),
        ("image_aspect_ratio", "anyres_max_0", "give square, pad, original, anyres or anyres_max_N"),
        ("image_grid_pinpoints", "[(24,48)]", "needs --image_aspect_ratio anyres, not square"),
        ("on_bad_sample", "guess", "invalid choice: 'guess'"),
        ("tokens_per_micro_batch", "many", "give one, auto or none"),
        ("gradient_checkpointing", "some", "give off, all or auto"),
        ("save_steps", "many", "--save_steps many is not a whole number"),
        ("learning_rate", "much", "--learning_rate much is not a number"),
        ("bf16", "perhaps", "--bf16 perhaps is neither True nor False"),
        ("recipe", "", "--recipe is empty: name a path"),
    ],
)  # fmt: skip
def test_bad_value_is_refused_by_name(flag, value, expected):
    message = refused(*NEEDED, f"--{flag}", value)
    assert f"--{flag}" in message and str(value) in message and expected in message


def test_models_on_the_hub_are_named_with_their_commands_in_one_message():
    models = ("--model_name_or_path", "lmsys/vicuna-7b-v1.5", "--vision_tower", "openai/clip-vit-large-patch14-336")
    with pytest.raises(ConfigError) as caught:
        read_flags([*models, "--data_path", "nowhere.json", "--output_dir", "out", "--deepspeed_config", "zero2"])
    said = str(caught.value).splitlines()
    for line, name in zip(said, models[1::2], strict=False):
        assert f"(hf download {name} --local-dir models/{name.split('/')[1]}) and give that folder" in line
    assert len(said) == 3 and "nowhere.json" in said[2]


def test_a_flag_out_of_bounds_is_said_once():
    said = refused(*NEEDED, "--num_train_epochs", "nan").splitlines()
    assert said == ["--num_train_epochs is nan: give a value above 0"]
    assert Bounds().expected(float("nan")) == "a finite number"


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--bf16", "True", "--fp16", "True"], "--bf16 and --fp16 are both set: choose one"),
        (["--num_train_epochs", "-5", "--max_steps", "3"], "--num_train_epochs is -5.0: give a value above 0"),
        (["--model_name_or_path", "lmsys/vicuna-7b"], "no such folder; if it is a name on the hub, download it"),
        (["--vision_tower", "."], "--vision_tower goes with --model_name_or_path"),
        (["--model_name_or_path", ".", "--vision_tower", "."], "--data_path is missing"),
        (["--force_sample", "True", "--frames_upbound", "0"], "--force_sample takes --frames_upbound frames"),
        (["--version", "plain"], "--version plain is stage 1's template"),
        (
            ["--tune_mm_mlp_adapter", "--freeze_mm_mlp_adapter"],
            "True trains the projector only, --freeze_mm_mlp_adapter",
        ),
        (
            ["--tune_mm_mlp_adapter", "--freeze_mm_mlp_adapter", "--unfreeze_mm_vision_tower"],
            "True trains the projector only, --freeze_mm_mlp_adapter",
        ),
        (
            ["--tune_mm_mlp_adapter", "--mm_tunable_parts", "mm_mlp_adapter"],
            "True and --mm_tunable_parts both choose",
        ),
        (
            ["--tune_mm_llm", "True", "--mm_tunable_parts", "mm_mlp_adapter"],
            "--tune_mm_llm and --mm_tunable_parts both choose the trained parts",
        ),
        (["--tune_mm_llm", "False"], "--tune_mm_llm False leaves nothing to train"),
        (["--mm_tunable_parts", "mm_adapter"], "names 'mm_adapter', not a part: give some of mm_vision_tower,"),
        (["--freeze_mm_mlp_adapter", "--mm_projector_lr", "1e-3"], "rate for the projector, but that does not train"),
        (
            ["--mm_vision_tower_lr", "1e-3"],
            "--mm_vision_tower_lr is a rate for the vision tower, but that does not train",
        ),
        (
            ["--group_by_length", "True", "--group_by_modality_length", "True"],
            "--group_by_modality_length and --group_by_length set different orders of the records: choose one",
        ),
        (["--shuffle", "False", "--group_by_length_bucket", "True"], "--group_by_length_bucket changes it"),
        (["--activation_memory_gb", "4"], "give one of these, or leave it out"),
        (["--activation_memory_gb", "-1", "--gradient_checkpointing", "auto"], "is -1.0: give a value above 0"),
        (
            ["--loss_reduction", "micro_batch", "--tokens_per_micro_batch", "auto"],
            "--loss_reduction micro_batch depends on the layout, but --tokens_per_micro_batch changes it",
        ),
        (
            ["--steps_across_epochs", "True", "--tokens_per_micro_batch", "auto"],
            "--steps_across_epochs True counts in micro-batches of --per_device_train_batch_size samples",
        ),
        (
            ["--steps_across_epochs", "True", "--tokens_per_micro_batch", "900"],
            "--steps_across_epochs True counts in micro-batches of --per_device_train_batch_size samples",
        ),
        (
            ["--pad_embeddings_to_multiple_of", "64"],
            "--pad_embeddings_to_multiple_of 64 has no effect without --resize_token_embeddings True: give that",
        ),
        (["--pad_embeddings_to_multiple_of", "0"], "--pad_embeddings_to_multiple_of is 0: give 1 or more"),
        (["--resize_vocab", "True"], "did you mean --resize_token_embeddings?"),
    ],
)
def test_flags_that_do_not_go_together_are_refused(argv, expected):
    assert expected in refused(*NEEDED, *argv)


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        ((), "off"),
        (("off",), "off"),
        (("False",), "off"),
        (("all",), "all"),
        (("True",), "all"),
        (("true",), "all"),
        (("auto",), "auto"),
    ],
)
def test_recomputation_is_asked_for_by_name_or_as_llavas_scripts_do(words, meant):
    given = ["--gradient_checkpointing", *words] if words else []
    args, _ = parse_arguments([*map(str, NEEDED), *given])
    assert args.training.gradient_checkpointing == meant
    bare, _ = parse_arguments([*map(str, NEEDED), "--gradient_checkpointing"])
    assert bare.training.gradient_checkpointing == "all"


def test_tokens_of_a_micro_batch_are_a_number_auto_or_none():
    for word, meant in (("8192", 8192), ("auto", "auto"), ("none", None)):
        args, _ = parse_arguments([*map(str, NEEDED), "--tokens_per_micro_batch", word])
        assert args.training.tokens_per_micro_batch == meant


def test_missing_output_dir_and_config_are_named():
    message = refused("--output_dir", "out")
    assert message == (
        "--deepspeed_config is missing: give zero3 or another of ds_configs/, the path of a DeepSpeed JSON, or auto"
    )
    assert parse_arguments(["--output_dir", "out", "--deepspeed_config", "zero3"])[0].training.deepspeed_config
    assert refused("--deepspeed", ZERO2) == "--output_dir is missing: name the folder for the run's files"


def test_checkpoints_of_the_model_alone_have_to_be_saved_at_some_time():
    message = refused(*NEEDED, "--save_strategy", "no", "--save_only_model", "True")
    assert message.startswith("--save_only_model True and --save_strategy no: ") and "\n" not in message


def test_every_other_spelling_of_a_flag_is_given_as_the_field_it_sets():
    words = ["--evaluation_strategy", "no", "--verbose_logging", "True", "--no_shuffle"]
    args, _ = parse_arguments([*map(str, NEEDED), *words])
    assert {"eval_strategy", "verbose", "shuffle"} <= args.given <= args.as_dict().keys()


def test_all_problems_come_in_one_error():
    message = refused("--save_steps", 0, "--adam_beta1", 2, "--eval_strategy", "epoch", "--data_path", "missing")
    lines = message.splitlines()
    for part in (
        "--save_steps",
        "--adam_beta1",
        "--eval_strategy",
        "--data_path",
        "--output_dir",
        "--deepspeed_config",
    ):
        assert sum(line.startswith(part) for line in lines) == 1, message
    assert len(lines) == 6


@pytest.mark.parametrize("text", ["- a\n- b\n", "learning_rate: [1, 2]\n", "data: {a: 1}\n", "just text\n", ""])
def test_a_recipe_that_is_no_flat_mapping_is_refused(tmp_path, text):
    path = recipe(tmp_path, text)
    assert (
        refused(*NEEDED, "--recipe", path) == f"--recipe {path} must be a YAML mapping of flag names to single values"
    )


def test_a_recipe_that_can_not_be_read_is_refused(tmp_path):
    assert "can't be read" in refused(*NEEDED, "--recipe", tmp_path / "missing.yaml")
    assert "can't be read" in refused(*NEEDED, "--recipe", recipe(tmp_path, "a: [1\n"))
    assert refused(*NEEDED, "--recipe") == "--recipe needs the path of a YAML file"


def test_every_recipe_in_the_package_parses():
    recipes = sorted((Path(__file__).parents[2] / "run" / "recipes").glob("*.yaml"))
    assert recipes
    objectives = every_objective()
    for path in recipes:
        objective = read_recipe(path).get("objective", "sft")
        if objective not in ("sft", *objectives):
            continue  # of an extension that was deleted
        pairs = ["--data_path", path] if objective != "sft" and objectives[objective].pairs else []
        parse("--recipe", path, *pairs)


def test_eval_samples_named_on_the_command_line_take_the_place_of_a_recipes_fraction(tmp_path):
    path = recipe(tmp_path, "eval_fraction: 0.02\neval_steps: 0.1\n")
    assert parse("--recipe", path).data.eval_fraction == 0.02
    named = parse("--recipe", path, "--eval_data_path", path).data
    assert (named.eval_fraction, named.eval_data_path) == (0.0, str(path))
    assert "--data_split train needs --data_path" in refused(*NEEDED, "--data_split", "train")
    assert "--eval_data_split a needs --eval_data_path" in refused(*NEEDED, "--eval_data_split", "a")
    both = refused(*NEEDED, "--eval_fraction", 0.1, "--eval_data_path", path)
    assert both == "--eval_fraction and --eval_data_path are both given: choose one"


def parse_tiny(*argv: object):
    argv = [*NEEDED, *map(str, argv)]
    return parse_arguments(argv, defaults=tiny_defaults(argv, RECIPES))[0]


def test_the_demos_split_is_not_that_of_ones_own_data(tmp_path):
    path = tmp_path / "mine.json"
    path.write_text("[]")
    demo = parse_tiny()
    assert (demo.data.eval_fraction, demo.training.eval_steps) == (0.02, 0.1)
    own = parse_tiny("--data-path", path)
    assert (own.data.eval_fraction, own.training.eval_steps) == (0.0, None)
    for flags in (("--eval_fraction", 0.5), ("--eval_data_path", path)):
        own = parse_tiny("--data_path", path, *flags)
        assert own.training.eval_steps == 0.1  # what is asked for is measured as often as in the demo
    asked = parse_tiny("--data_path", path, "--eval_fraction", 0.5, "--eval_steps", 3)
    assert (asked.data.eval_fraction, asked.training.eval_steps) == (0.5, 3)
    with pytest.raises(ConfigError, match="--eval_steps 3 computes the loss on eval samples"):
        parse_tiny("--data_path", path, "--eval_steps", 3)


def test_no_split_means_no_steps_to_measure_it_at(tmp_path):
    path = recipe(tmp_path, "eval_fraction: 0.02\neval_steps: 0.1\n")
    for args in (parse_tiny("--eval_fraction", 0), parse("--recipe", path, "--eval-fraction=0")):
        assert (args.data.eval_fraction, args.training.eval_steps) == (0.0, None) and "eval_steps" not in args.given
    with pytest.raises(ConfigError, match="--eval_steps 3 computes the loss on eval samples"):
        parse_tiny("--eval_fraction", 0, "--eval_steps", 3)


def test_replaced_changes_a_flag_in_whichever_section():
    args = parse().replaced(version="plain", image_folder="x", bf16=True)
    assert (args.model.version, args.data.image_folder, args.training.bf16) == ("plain", "x", True)
    assert args.as_dict() == {**parse().as_dict(), "version": "plain", "image_folder": "x", "bf16": True}


@pytest.mark.parametrize(
    ("given", "means"),
    [
        ([], None),
        (["none"], ""),
        (["all"], "tensorboard,wandb,trackio"),
        (["wandb"], "wandb"),
        (["wandb,tensorboard"], "wandb,tensorboard"),
        (["trackio", "wandb", "trackio"], "trackio,wandb"),
    ],
)
def test_report_to_takes_names_with_blanks_or_commas_between(next_script, given, means):
    without = [token for token in next_script if token not in ("--report_to", "wandb")]
    args, _ = parse_arguments([*without, *(["--report_to", *given] if given else [])])
    assert args.training.report_to == means


def test_a_tracker_that_is_unknown_or_missing_is_named_with_its_extra(next_script, monkeypatch):
    for module in ("parsing", "rules"):
        monkeypatch.setattr(f"llava_ds.config.{module}.is_installed", lambda name: name == "tensorboard")
    with pytest.raises(ConfigError, match="--report_to wandb: wandb is not installed: pip install wandb, or"):
        parse_arguments(next_script)
    with pytest.raises(ConfigError, match="--report_to mlflow is unknown: give some of tensorboard, wandb, trackio"):
        parse_arguments([*next_script, "--report_to", "mlflow"])
    args, _ = parse_arguments([*next_script, "--report_to", "all"])
    assert args.training.report_to == "tensorboard"
    assert parse_arguments(next_script, to_train=False)[0].training.report_to == "wandb"  # where nothing is reported


def test_a_folder_of_a_packages_name_is_no_package(tmp_path, monkeypatch):
    (tmp_path / "left_by_a_run").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert find_spec("left_by_a_run") is not None and not is_installed("left_by_a_run")
    assert is_installed("torch") and not is_installed("there_is_no_such_package")


def test_verbose_has_llava_nexts_name_too(next_script):
    args, _ = parse_arguments(next_script)
    assert args.training.verbose and "verbose" in args.given and args.training.run_name == "name"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--unfreeze_topk_llm 2", "--unfreeze_topk_llm unfreezes layers of the language model, but all of it trains"),
        ("--unfreeze_topk_vision 2 --unfreeze_mm_vision_tower True", "but all of it trains: give no"),
    ],
)
def test_last_layers_of_what_trains_whole_are_refused(flags, message):
    assert message in refused(*NEEDED, *flags.split())


NUMBERS = [
    (section, name, kind)
    for section in every_section()
    for name, kind in typing.get_type_hints(section).items()
    if name in declared_by(section)
    and {int, float} & {kind, *typing.get_args(kind)}
    and typing.get_origin(kind) is not typing.Literal
]


@pytest.mark.parametrize(("section", "name"), [(section, name) for section, name, _ in NUMBERS])
def test_every_number_has_bounds_beside_its_field(section, name):
    bounds = bounds_of(section).get(name)
    assert bounds is not None, (
        f"give {name} a type of llava_ds/config/bounds.py, like Count or Annotated[int, Bounds(2)]"
    )
    default = getattr(section, name)
    assert default is None or bounds.holds(default)


def asking(section: type, name: str) -> list[str]:
    """The flag of the core without which one of an extension would not be read."""
    values = declared_by(section)[name].goes_with.split()
    known = [(flag, own) for trigger in EXTENSIONS.values() for flag, own in trigger.adds.items()]
    return [f"--{flag}={values[0]}" for flag, own in known if values and values[0] in own]


@pytest.mark.parametrize(("section", "name", "kind"), NUMBERS)
def test_no_number_takes_what_is_none(section, name, kind):
    whole, asked = int in (kind, *typing.get_args(kind)), asking(section, name)
    for value in (10**30, -(10**30)) if whole else ("nan", "inf", "-inf"):
        message = refused(*NEEDED, *asked, f"--{name}={value}")
        assert f"--{name} is {float(value) if not whole else value}: give " in message


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--seed", -1], "--seed is -1: give 0 or more"),
        (["--seed", 2**70], f"--seed is {2**70}: give 4,294,967,295 or less"),
        (["--data_seed", -1], "--data_seed is -1: give 0 or more"),
        (["--watchdog_step_s", "nan"], "--watchdog_step_s is nan: give 0 or more"),
        (["--train_batch_size", 10**30], f"--train_batch_size is {10**30}: give 2,147,483,647 or less"),
        (["--output_dir", ""], "--output_dir is empty: name a path"),
        (["--cache_dir", ""], "--cache_dir is empty: name a path"),
        (["--output_dir", "x" * 300], "can't be written to: name another folder"),
        (["--output_dir", "new/" + "x" * 300 + "/run"], "can't be written to: name another folder"),
        (["--output_dir", "/proc/none"], "--output_dir /proc/none can't be written to: name another folder"),
        (["--cache_dir", "/proc/cache"], "--cache_dir /proc/cache can't be written to: name another folder"),
        (["--output_dir", "/dev/full"], "--output_dir /dev/full can't be written to: name another folder"),
    ],
)
def test_values_that_once_ended_in_a_traceback_or_passed(flags, message):
    assert message in refused(*NEEDED, *flags)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: " + "[" * 1500, "is nested too deeply"),
        ("seed: 2024-13-45", "can't be read"),
        ("1: 2", "1 is not a flag's name"),
        ("recipe: other.yaml", "names recipe, allowed on the command line only"),
        ("help: true", "names help, allowed on the command line only"),
        ("seed: 0x" + "f" * 5000, "seed is a number with thousands of digits, and no flag takes that"),
        ("# " + "x" * 1_000_000, "has more than 1,000,000 bytes"),
    ],
)
def test_a_recipe_that_is_none_is_refused(tmp_path, text, message):
    assert message in refused(*NEEDED, "--recipe", recipe(tmp_path, text))


def test_a_recipe_that_would_be_waited_for_is_refused(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    assert "that is not a file" in refused(*NEEDED, "--recipe", tmp_path / "fifo")


def test_of_two_recipes_the_last_counts(tmp_path):
    args = parse("--recipe", "no such file", "--recipe", recipe(tmp_path, "seed: 7"))
    assert args.training.seed == 7


def test_a_recipes_value_may_begin_with_hyphens(tmp_path):
    assert parse("--recipe", recipe(tmp_path, 'run_name: "--seed"')).training.run_name == "--seed"


def test_every_field_is_declared_as_a_flag():
    names = [field.name for section in SECTIONS for field in dataclasses.fields(section) if field.init]
    assert names == list(FLAGS) and len(set(names)) == len(names)
    assert {flag.group for flag in FLAGS.values()} == set(GROUPS)


def test_paths_and_workers_may_differ_between_machines():
    values = parse().same_on_every_rank()
    assert "--learning_rate" in values and "--seed" in values
    assert not {"--output_dir", "--data_path", "--cache_dir", "--resume", "--dataloader_num_workers"} & set(values)


def test_a_resume_may_change_what_decides_nothing():
    free, rewinding = flags_free_on_resume(every_flag()), flags_free_on_resume(every_flag(), rewinds=True)
    assert {"output_dir", "save_total_limit", "gradient_checkpointing"} <= rewinding < free
    assert free - rewinding >= {"logging_steps", "save_steps"}
    assert not {"learning_rate", "seed", "version", "train_batch_size"} & free


def test_help_spells_each_flag_once_under_its_groups_title():
    text, whole = build_parser().format_help(), build_parser().format_help("all")
    extensions = [f"{name}: {trigger.title}" for name, trigger in EXTENSIONS.items() if trigger.flags]
    last = "accepted without effect, for LLaVA's scripts"
    for shown, more in ((text, []), (whole, extensions)):
        flags = re.findall(r"^  (--\w+)", shown, re.MULTILINE)
        assert len(set(flags)) > 120 and (more or len(flags) == len(set(flags)))
        assert "--model-name-or-path" not in shown and "--no_shuffle" not in shown
        titles = re.findall(r"^(\S.*):\n  ", shown, re.MULTILINE)
        assert titles[: len(GROUPS) + len(more) + 1] == [*GROUPS.values(), *more, last]
        assert max(map(len, shown.splitlines())) < 130


@pytest.mark.parametrize("name", EXTENSIONS)
def test_help_shows_an_extension_in_a_line_and_its_flags_when_asked(name, capsys):
    text, own = build_parser().format_help(), build_parser().format_help(name)
    flags = declared_by(flags_class(name))
    assert re.search(rf"^  {name}( |$)", text, re.MULTILINE) and not any(f"--{flag} " in text for flag in flags)
    assert re.findall(r"^  --(\w+)", own, re.MULTILINE) == list(flags)
    with pytest.raises(SystemExit):
        parse_arguments(["--help", name])
    assert capsys.readouterr().out == own


def test_help_about_nothing_that_there_is_names_what_there_is():
    assert "--help learning_rate: unknown extension: give all, or" in refused("--help", "learning_rate")


def test_deepspeed_as_a_switch_goes_with_its_configuration(tmp_path):
    config = tmp_path / "ds.json"
    config.write_text("{}")
    for argv in (
        ["--deepspeed", "--deepspeed_config", str(config), "--output_dir", "out"],
        ["--deepspeed_config", str(config), "--output_dir", "out", "--deepspeed"],
        [f"--deepspeed_config={config}", "--deepspeed", "--output_dir", "out"],
        ["--output_dir", "out", "--deepspeed", str(config)],
    ):
        assert parse_arguments(argv)[0].training.deepspeed_config == str(config)
    with pytest.raises(ConfigError, match="--deepspeed"):
        parse_arguments(["--deepspeed", "--output_dir", "out"])


@pytest.mark.parametrize(
    ("flag", "says"),
    [
        ("--dataset_name", ": did you mean --data_path?"),
        ("--dataset_train_split", ": did you mean --data_split?"),
        ("--max_seq_len", ": did you mean --model_max_length?"),
        ("--image_tower", ": did you mean --vision_tower?"),
        ("--actor_learning_rate", ": did you mean --learning_rate?"),
        ("--num_padding_at_beginning", ": leave it out, because nothing is padded"),
        ("--eval_iters", ": leave it out, because the eval loss is the mean over all eval samples"),
        ("--zero_stage", ': did you mean "stage" in the DeepSpeed JSON (--deepspeed_config ds_configs/zero2.json)?'),
    ],
)
def test_other_trainers_flags_lead_to_what_is_meant_here(flag, says):
    assert refused(*NEEDED, flag, 2) == f"unknown flag {flag}{says}"


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_shipped_recipe_is_found_by_name(tmp_path, monkeypatch, path):
    """Also llava-v1.5-7b-lora, in which a dot is no suffix's."""
    monkeypatch.chdir(tmp_path)
    for name in (path.stem, path.name, f"recipes/{path.name}"):
        assert found(name, RECIPES, ".yaml") == str(path)


def test_parts_that_train_with_last_layers():
    def parts(*flags: str) -> set[str]:
        return set(trained_parts(parse(*flags).model))

    assert parts("--freeze_backbone", "True", "--unfreeze_topk_llm", "2") == {
        "language_model", "output_layer", "projector"
    }  # fmt: skip
    assert parts("--tune_mm_mlp_adapter", "True", "--unfreeze_topk_vision", "1") == {"vision_tower", "projector"}


@pytest.mark.parametrize(
    ("flag", "value"), [("image_folder", "."), ("data_format", "sharegpt"), ("data_columns", "image=picture")]
)
def test_flags_of_records_are_refused_with_the_generated_scenes(flag, value):
    with pytest.raises(ConfigError) as caught:
        parse_arguments([*NEEDED, f"--{flag}", value])
    assert str(caught.value) == (
        f"--{flag} {value} goes with --data_path: the generated scenes need none, give that, or leave it out"
    )
