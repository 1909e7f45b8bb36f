"""Flags of reinforcement learning: those that don't go together are refused, and what the tiny recipes say of them."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from extension_there import needs_extension

from llava_ds.config.arguments import rate_note
from llava_ds.config.parsing import parse_arguments, tiny_defaults
from llava_ds.config.recipes import RECIPES
from llava_ds.constants import ConfigError
from llava_ds.extensions.rl.extension import objective
from llava_ds.extensions.rl.grpo import Correction, PolicyLoss
from llava_ds.runtime.mesh import Mesh

NEEDED = ["--output_dir", "out", "--deepspeed_config", "zero2"]


def refusal(*flags: str) -> str:
    with pytest.raises(ConfigError) as refused:
        parse_arguments([*NEEDED, *flags])
    return str(refused.value)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--reward_funcs", "exact"], "--reward_funcs belongs to --objective grpo and ppo, not sft"),
        (["--objective", "grpo"], "--objective grpo needs --reward_funcs"),
        (
            ["--objective", "grpo", "--loss_type", "ipo"],
            "invalid choice: 'ipo' (choose from 'dapo', 'grpo', ",
        ),
        (["--objective", "grpo", "--loss_type", "cispo"], "--loss_type cispo needs --epsilon_high of at least 1"),
        (
            ["--objective", "grpo", "--loss_type", "cispo", "--epsilon_high", "5", "--epsilon", "0.1"],
            "--epsilon has no effect with --loss_type cispo",
        ),
        (["--objective", "grpo", "--loss_type", "sapo", "--epsilon_high", "0.3"], "--epsilon_high has no effect with"),
        (["--objective", "grpo", "--sapo_temperature_neg", "2"], "no effect with --loss_type dapo: leave it out"),
        (
            ["--objective", "grpo", "--loss_type", "rloo", "--beta", "1", "--use_bias_correction_kl", "True"],
            "--use_bias_correction_kl has no effect with --loss_type rloo",
        ),
        (
            ["--objective", "grpo", "--vllm_server", "http://127.0.0.1:1", "--top_p", "0.9"],
            "--top_k and --top_p can't be used with --vllm_importance_sampling_correction",
        ),
        (["--objective", "grpo", "--loss_type", "rloo", "--scale_rewards", "none"], "no effect with --loss_type rloo"),
        (
            ["--objective", "grpo", "--vllm_importance_sampling_mode", "token_mask"],
            "--vllm_importance_sampling_mode has no effect without --vllm_server",
        ),
        (
            ["--objective", "grpo", "--vllm_server", "http://127.0.0.1:1", "--vllm_importance_sampling_clip_min", "4"],
            "--vllm_importance_sampling_clip_min is 4, but the upper bound is 3",
        ),
        (["--objective", "grpo", "--soft_punish_cache", "9", "--reward_funcs", "exact"], "without the reward length"),
        (
            ["--objective", "grpo", "--soft_punish_cache", "300", "--reward_funcs", "exact, length"],
            "--soft_punish_cache is 300, but answers have at most 256 tokens",
        ),
        (["--objective", "grpo", "--epsilon", "1"], "--epsilon is 1: a ratio of probabilities can't fall by more"),
        (["--objective", "grpo", "--use_bias_correction_kl", "True"], "has no effect without --beta"),
        (
            ["--objective", "grpo", "--num_generations", "1"],
            "--num_generations is 1: grpo compares the answers to a prompt",
        ),
        (["--objective", "grpo", "--eval_fraction", "0.1"], "--eval_fraction can't be used with --objective grpo"),
        (["--objective", "ppo"], "--objective ppo needs --reward_funcs"),
        (["--objective", "ppo", "--beta", "1"], "not ppo: leave one of them out"),
        (["--objective", "ppo", "--loss_type", "dapo"], "grpo, not ppo: leave one of them out"),
        (["--objective", "grpo", "--kl_ctl", "1"], "--kl_ctl belongs to --objective ppo, not grpo"),
        (["--objective", "ppo", "--dynamic_sample", "True"], "--dynamic_sample belongs to --objective grpo"),
        (["--objective", "grpo", "--max_resample_times", "2"], "has no effect without --dynamic_sample True"),
        (["--objective", "grpo", "--max_resample_times", "0"], "give 1 or more; --dynamic_sample False tries no other"),
        (["--objective", "grpo", "--top_p", "0"], "--top_p is 0"),
        pytest.param(
            ["--objective", "ppo", "--critic_model_name_or_path", "critic", "--lora_enable", "True"],
            "--critic_model_name_or_path can't be used with adapters",
            marks=needs_extension("lora"),
        ),
        (["--objective", "grpo", "--vllm_server", "http://10.0.0.1:8765"], "give an address on this machine"),
        (["--objective", "grpo", "--vllm_server", "http://[::1"], "give an address on this machine"),
        (["--vllm_server", "http://127.0.0.1:1"], "--vllm_server belongs to --objective grpo and ppo"),
        pytest.param(
            ["--objective", "grpo", "--vllm_server", "http://127.0.0.1:1", "--lora_enable", "True"],
            "--vllm_server needs a run that exports a whole model",
            marks=needs_extension("lora"),
        ),
        (
            ["--objective", "grpo", "--vllm_server", "http://127.0.0.1:1", "--resize_token_embeddings", "True"],
            "can't be used with --vllm_server, whose model has the rows of its folder",
        ),
    ],
)
def test_flags_that_do_not_go_together_are_refused(flags, expected):
    assert expected in refusal(*flags)


@needs_extension("spikes")
def test_a_run_that_draws_its_answers_can_not_go_back():
    flags = ["--objective", "ppo", "--reward_funcs", "exact", "--on_loss_spike", "rewind"]
    assert "--on_loss_spike rewind can't be used with --objective ppo" in refusal(*flags)


@pytest.mark.parametrize("objective", ["grpo", "ppo"])
def test_the_tiny_recipes_eval_samples_are_not_blamed_on_a_run_of_rewards(objective):
    argv = [*NEEDED, "--objective", objective, "--reward_funcs", "exact"]
    assert not {"eval_fraction", "eval_steps"} & set(tiny_defaults(argv, RECIPES))
    assert parse_arguments(argv, defaults=tiny_defaults(argv, RECIPES))


@pytest.mark.parametrize(
    ("flag", "hint"),
    [
        ("--ppo_epochs", "did you mean --num_iterations?"),
        ("--temprature", "did you mean --temperature?"),
        ("--offload_reference_model", "did you mean --kl_ctl 0 (no reference model; it would be whole on every rank)?"),
        ("--print_answers", "leave it out, because rollouts.jsonl has answers of every step with their rewards"),
    ],
)
def test_misspelled_flags_and_those_of_other_trainers_lead_to_ours(flag, hint):
    assert f"unknown flag {flag}: {hint}" in refusal(flag, "1")


def test_a_default_rate_that_is_too_high_is_named():
    given = [*NEEDED, "--objective", "grpo", "--reward_funcs", "exact"]
    [line] = rate_note(parse_arguments(given)[0])
    assert line.startswith("--learning_rate 2e-05 is the default of tuning on answers") and "about 1e-06" in line
    assert rate_note(parse_arguments([*given, "--learning_rate", "2e-5"])[0]) == []
    assert rate_note(parse_arguments(NEEDED)[0]) == []


@pytest.mark.parametrize(
    ("flag", "expected"), [("--help", "Train a LLaVA model on rewards"), ("--epsilo", "run/rl.py: error:")]
)
def test_the_script_speaks_under_its_own_name(flag, expected):
    script = Path(__file__).resolve().parents[3] / "run" / "rl.py"
    environ = {**os.environ, "DS_ACCELERATOR": "cpu"}
    done = subprocess.run([sys.executable, str(script), flag, "1"], env=environ, capture_output=True, text=True)
    assert (done.stdout or done.stderr).startswith(expected)


@pytest.mark.parametrize(("rewards", "wanted"), [("exact", False), ("exact,mine.py:f", True)])
def test_only_functions_of_files_need_the_other_columns(rewards, wanted):
    args, _ = parse_arguments([*NEEDED, "--objective", "grpo", "--reward_funcs", rewards])
    assert args.traits.other_columns is wanted


def loss_of(*flags: str) -> PolicyLoss:
    args = parse_arguments([*NEEDED, "--objective", "grpo", "--reward_funcs", "exact", *flags])[0]
    return objective(SimpleNamespace(args=args), Mesh(dp=1, dp_rank=0), SimpleNamespace(num_sources=1)).loss


def test_flags_reach_the_loss():
    assert loss_of() == PolicyLoss()
    given = "--loss_type sapo --sapo_temperature_pos 2 --sapo_temperature_neg 3 --entropy_coef 0.1 --beta 0.2"
    wanted = PolicyLoss(beta=0.2, loss_type="sapo", gates=(2.0, 3.0), entropy_coef=0.1)
    assert loss_of(*given.split()) == wanted
    assert loss_of("--loss_type", "cispo", "--epsilon_high", "5") == PolicyLoss(epsilon_high=5.0, loss_type="cispo")
    assert loss_of("--loss_type", "rloo", "--beta", "0.2") == PolicyLoss(loss_type="rloo")  # in the rewards
    given = (
        "--use_bias_correction_kl True --beta 0.2 --importance_sampling_level sequence --temperature 0.7 --epsilon 0.1"
    )
    wanted = PolicyLoss(0.1, 0.1, "sequence", 0.2, corrects_kl=True, temperature=0.7)
    assert loss_of(*given.split()) == wanted


def test_answers_of_a_server_are_corrected_unless_told_otherwise():
    server = ["--vllm_server", "http://127.0.0.1:8765"]
    assert loss_of(*server).correction == Correction("sequence_mask", 3.0, None)
    bounds = "--vllm_importance_sampling_clip_max 2 --vllm_importance_sampling_clip_min 0.5"
    mode = ["--vllm_importance_sampling_mode", "token_truncate"]
    assert loss_of(*server, *mode, *bounds.split()).correction == Correction("token_truncate", 2.0, 0.5)
    assert loss_of(*server, "--vllm_importance_sampling_correction", "False").correction is None
