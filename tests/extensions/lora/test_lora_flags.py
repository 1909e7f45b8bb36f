"""Flags of LoRA and of packed weights: how they are spelled, what they say of what trains, and what they contradict."""

from pathlib import Path

import pytest
import toys
from ds_json import CONFIGS

from llava_ds.config.arguments import adapted_parts, trained_parts, trains_projector_only
from llava_ds.config.parsing import parse_arguments, tiny_defaults
from llava_ds.config.recipes import RECIPES, read_recipe
from llava_ds.constants import ConfigError
from llava_ds.extensions.lora.flags import Flags
from llava_ds.model.open.tower import read_tower
from llava_ds.tiny import CLIP_PATH

ZERO2 = str(CONFIGS / "zero2.json")
NEEDED = ["--deepspeed_config", ZERO2, "--output_dir", "out"]


@pytest.fixture(autouse=True)
def everything_to_report_to(monkeypatch):
    """LLaVA's scripts report to W&B, which has no part in these tests."""
    for module in ("parsing", "rules"):
        monkeypatch.setattr(f"llava_ds.config.{module}.is_installed", lambda name: True)


def parse_tiny(*argv: object):
    argv = list(map(str, argv))
    return parse_arguments([*NEEDED, *argv], defaults=tiny_defaults(argv, RECIPES))[0]


def recipe(folder: Path, text: str) -> Path:
    path = folder / "recipe.yaml"
    path.write_text(text)
    return path


def parse(*argv: object):
    return parse_arguments([*NEEDED, *map(str, argv)])[0]


def refused(*argv: object) -> str:
    """The message with which a command line is refused."""
    with pytest.raises(ConfigError) as caught:
        parse_arguments(list(map(str, argv)))
    return str(caught.value)


# LLaVA's scripts/v1_5/finetune_lora.sh and scripts/finetune_qlora.sh, but for the paths.
LORA_SCRIPT = """
    --lora_enable True --lora_r 128 --lora_alpha 256 --mm_projector_lr 2e-5 --deepspeed {zero2}
    --model_name_or_path {here}/llama --version v1 --data_path {here}/data.json --image_folder {here}/images
    --vision_tower {here}/clip --pretrain_mm_mlp_adapter {here}/mm_projector.bin --mm_projector_type mlp2x_gelu
    --mm_vision_select_layer -2 --mm_use_im_start_end False --mm_use_im_patch_token False --image_aspect_ratio pad
    --group_by_modality_length True --bf16 True --output_dir out --num_train_epochs 1 --per_device_train_batch_size 16
    --per_device_eval_batch_size 4 --gradient_accumulation_steps 1 --evaluation_strategy no --save_strategy steps
    --save_steps 50000 --save_total_limit 1 --learning_rate 2e-4 --weight_decay 0. --warmup_ratio 0.03
    --lr_scheduler_type cosine --logging_steps 1 --tf32 True --model_max_length 2048 --gradient_checkpointing True
    --dataloader_num_workers 4 --lazy_preprocess True --report_to wandb"""


@pytest.fixture
def lora_script(tmp_path) -> list[str]:
    for name in ("llama", "clip", "images"):
        (tmp_path / name).mkdir()
    for name in ("data.json", "mm_projector.bin"):
        (tmp_path / name).write_text("[]")
    return LORA_SCRIPT.format(zero2=ZERO2, here=tmp_path).split()


def test_llavas_lora_scripts_parse(lora_script):
    args, notes = parse_arguments(lora_script)
    flags = args.own["lora"]
    assert (flags.lora_enable, flags.lora_r, flags.lora_alpha, flags.lora_dropout) == (True, 128, 256, 0.05)
    assert (flags.lora_bias, flags.lora_weight_path, flags.bits) == ("none", None, 16)
    assert not any("lora" in note for note in notes)
    args, notes = parse_arguments([*lora_script, "--bits", "4", "--double_quant", "False", "--lora_weight_path", ""])
    assert (args.own["lora"].bits, args.own["lora"].quant_type, args.own["lora"].double_quant) == (4, "nf4", False)
    assert args.own["lora"].lora_weight_path is None


def test_the_recipe_of_7b_has_the_values_of_llavas_script(lora_script):
    recipe = read_recipe(Path(__file__).parents[3] / "run" / "recipes" / "llava-v1.5-7b-lora.yaml")
    args, _ = parse_arguments(lora_script)
    ours = {"train_batch_size", "save_steps", "gradient_checkpointing", "tokens_per_micro_batch", "sample_steps"}
    same = set(recipe) - ours
    assert {name: args.as_dict()[name] for name in same} == {name: recipe[name] for name in same}
    assert recipe["train_batch_size"] == 16 * 8  # on the script's 8 GPUs
    # The script recomputes every layer, whatever the memory, and lays samples out by count: it changes no result.
    assert (args.training.tokens_per_micro_batch, recipe["tokens_per_micro_batch"]) == (None, "auto")
    assert (args.training.gradient_checkpointing, recipe["gradient_checkpointing"]) == ("all", "auto")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--lora_enable True --lora_r 0", "--lora_r is 0: give 1 or more"),
        ("--lora_enable True --lora_alpha 0", "--lora_alpha is 0: give 1 or more"),
        ("--lora_enable True --lora_dropout 1", "--lora_dropout is 1.0: give a value from 0 to below 1"),
        ("--lora_enable True --lora_weight_path nowhere", "--lora_weight_path nowhere: no such folder"),
        ("--lora_enable True --tune_mm_mlp_adapter True", "but --tune_mm_mlp_adapter freezes it: choose one"),
        ("--lora_enable True --mm_tunable_parts mm_mlp_adapter", "but --mm_tunable_parts freezes it: choose one"),
        ("--bits 4", "--bits 4 needs --lora_enable True: packed weights can't be trained"),
        ("--lora_enable True --lora_modules tower", "--lora_modules names 'tower', an unknown part: choose from"),
        (
            "--lora_enable True --lora_modules vision --unfreeze_mm_vision_tower True",
            "--unfreeze_mm_vision_tower True and --lora_modules vision both define how the tower trains: give one",
        ),
        (
            "--lora_enable True --lora_rank_pattern q_proj",
            "--lora_rank_pattern q_proj: expected JSON of names with whole",
        ),
        ('--lora_enable True --lora_alpha_pattern {"(":8}', "( is not a regular expression"),
        ("--lora_enable True --lora_target_modules (q", "--lora_target_modules (q is not a regular expression"),
        (
            "--lora_enable True --lora_target_modules q.* v.*",
            "give names, or one regular expression: join several by |",
        ),
        (
            "--lora_enable True --init_lora_weights eva",
            "--init_lora_weights eva is unknown: give true, gaussian, olora",
        ),
        (
            "--lora_enable True --init_lora_weights pissa --bits 4",
            "with --bits 4: nothing can be subtracted from packed weights",
        ),
        ("--lora_enable True --init_lora_weights olora --lora_weight_path .", "both initialize LoRA, give one of"),
        ("--lora_enable True --use_dora True --bits 8", "--use_dora True can't be used with --bits 8"),
        (
            "--lora_enable True --bits 4 --lora_modules vision",
            "leave out --lora_modules vision, or name language in it",
        ),
        ("--lora_enable True --bits 4 --lora_target_modules q_proj", "each with LoRA: leave out --lora_target_modules"),
        ("--unfreeze_topk_vision 2 --lora_enable True", "can't be used with --lora_enable: name the layers by"),
        ("--use_dora True", "--use_dora without --lora_enable would train the whole language model"),
        ("--lora_r 8 --lora_alpha 8", "--lora_r, --lora_alpha without --lora_enable would train the whole language"),
    ],
)
def test_flags_of_lora_that_contradict_are_refused(flags, message):
    assert message in refused(*NEEDED, *flags.split())


@pytest.mark.parametrize("flags", ["--bits 3", "--quant_type int4", "--lora_bias some"])
def test_unknown_kinds_of_lora_are_refused(flags):
    assert "invalid choice" in refused(*NEEDED, "--lora_enable", "True", *flags.split())


def test_flags_that_say_nothing_without_4_bits_are_named():
    flags = ("--lora_enable", "True", "--bits", "8", "--quant_type", "fp4", "--double_quant", "False")
    _, notes = parse_arguments([*NEEDED, *flags])
    assert "--quant_type fp4 has no effect: --bits is 8, not 4" in notes
    assert "--double_quant False has no effect: --bits is 8, not 4" in notes


def test_parts_that_train_with_lora_():
    def parts(*flags: str) -> set[str]:
        return set(trained_parts(parse(*flags).model))

    lora = ("--lora_enable", "True", "--lora_modules")
    assert parts(*lora, "language") == {"language_model", "projector"}
    assert parts(*lora, "vision") == {"projector"}  # and never the language model in full
    assert parts(*lora, "vision, projector") == set()
    assert not trains_projector_only(parse(*lora, "vision").model)
    model = parse(*lora, "language", "--lora_target_modules", "q_proj", "v_proj").own["lora"]
    assert model.lora_target_modules == "q_proj,v_proj"
    model = parse(*lora, "language", "--lora_target_modules", r".*layers\.\d{1,2}\.mlp.*").own["lora"]
    assert model.lora_target_modules == r".*layers\.\d{1,2}\.mlp.*"


@pytest.mark.parametrize(
    "flags",
    [
        ["--lora_modules", "language,vision,projector", "--mm_projector_lr", "2e-5", "--mm_vision_tower_lr", "2e-6"],
        ["--lora_modules", "vision", "--tune_mm_vision", "True"],
    ],
)
def test_a_part_with_lora_trains(flags):
    args = parse_tiny("--lora_enable", "True", *flags)
    assert "vision_tower" in adapted_parts(args.model)


def test_true_is_how_lora_begins_in_a_recipe_too(tmp_path):
    path = recipe(tmp_path, "lora_enable: true\ninit_lora_weights: true\n")
    assert parse_tiny("--recipe", path).own["lora"].init_lora_weights == "true"


@pytest.mark.parametrize("words", [["all-linear"], ["All-Linear"], ["all"], []])
def test_all_linear_is_what_leaving_the_targets_out_means(words):
    flags = ["--lora_enable", "True", *(["--lora_target_modules", *words] if words else [])]
    assert parse_arguments([*NEEDED, *flags])[0].own.get("lora", Flags()).lora_target_modules is None
    assert parse_arguments([*NEEDED, *flags, "--bits", "4"])  # which packs all of them


@pytest.mark.parametrize("words", [["all-linear", "q_proj"], ["q_proj,all-linear"], ["lm_head", "all"]])
def test_all_linear_stands_alone(words):
    with pytest.raises(ConfigError) as caught:
        parse_arguments([*NEEDED, "--lora_enable", "True", "--lora_target_modules", *words])
    joined = ",".join(words)
    word = "all-linear" if "all-linear" in joined else "all"
    assert str(caught.value) == (
        f"--lora_target_modules {joined}: {word} means every linear layer, give it alone, or names without it"
    )


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--tune_mm_mlp True", "but --tune_mm_llm freezes it: choose one"),
        ("--resize_token_embeddings True", "can't be used with --lora_enable: the adapter would fit no folder"),
    ],
)
def test_other_flags_that_it_does_not_go_with(flags, message):
    assert message in refused(*NEEDED, "--lora_enable", "True", *flags.split())


@pytest.mark.parametrize(
    ("flag", "says"),
    [
        ("--lora_dim 2", "--lora_r"),
        ("--lora_alpah 8", "--lora_alpha"),
        ("--lora_target q_proj", "--lora_target_modules"),
        ("--load_in_4bit True", "--bits 4"),
        ("--tuner_type lora", "--lora_enable"),
    ],
)
def test_what_other_trainers_call_its_flags(flag, says):
    assert refused(*NEEDED, *flag.split()) == f"unknown flag {flag.split()[0]}: did you mean {says}?"


@pytest.mark.parametrize("text", ['{"a": 1, "a": 2}', "[1]", "NaN", "{"])
def test_a_pattern_is_json_of_whole_numbers(text):
    for name in ("lora_rank_pattern", "lora_alpha_pattern"):
        said = refused(*NEEDED, "--lora_enable", "True", f"--{name}", text)
        assert said == f'--{name} {text}: expected JSON of names with whole numbers, like {{"down_proj": 8}}'


QUANTIZED = ("zero_quantized_weights", "zero_quantized_nontrainable_weights", "stage3_use_all_reduce_for_fetch_params")


@pytest.mark.parametrize(
    ("zero", "bits", "problem"),
    [
        ({"stage": 3}, 8, "--bits 8 at stage 3: bitsandbytes keeps every whole 8-bit weight"),
        ({"stage": 2}, 8, None),
        ({"stage": 3}, 4, None),
        *(({"stage": 3, key: True}, 4, f"zero_optimization.{key} is true and computes") for key in QUANTIZED),
        ({"stage": 3, "offload_param": {"device": "nvme"}}, 4, "with buffers of one type, but --bits 4 has two"),
    ],
)
def test_settings_of_zero_that_packed_weights_do_not_go_with(zero, bits, problem):
    lines = list(Flags(lora_enable=True, bits=bits).json_problems({"zero_optimization": zero}))
    assert lines == [] if problem is None else problem in lines[0]


def test_two_towers_have_no_adapter():
    with pytest.raises(ConfigError, match="two towers can't be combined with an adapter of the tower: leave it out"):
        read_tower(f"{CLIP_PATH},{CLIP_PATH}", toys.model_arguments(lora_enable=True, lora_modules="language,vision"))
