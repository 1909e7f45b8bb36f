"""run/estimate.py: what it prints, for which flags, and what it refuses."""

import importlib.util
import json
import math
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import toys
from launching import ROOT, ds_config
from safetensors import safe_open
from transformers import BloomConfig

from llava_ds.constants import ConfigError

SCRIPT = ROOT / "run" / "estimate.py"


@pytest.fixture(scope="module")
def main():
    spec = importlib.util.spec_from_file_location("estimate", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.main


@pytest.fixture
def figures(main, capsys):
    """The JSON object that flags give."""

    def run(*flags: str) -> dict:
        main([*flags, "--json"])
        return json.loads(capsys.readouterr().out)

    return run


def test_13_billion_parameters(figures):
    assert figures("--model", "13e9", "--num_gpus", "1")["bytes"]["ZeRO-0"]["model_states"] == 208 * 10**9
    assert figures("--model", "13e9", "--num_gpus", "8")["bytes"]["ZeRO-3"]["model_states"] == 26 * 10**9


def test_all_stages_stand_side_by_side_with_a_verdict_and_advice(main, capsys):
    main(["--model", "llava-v1.5-7b", "--num_gpus", "4", "--gpu_memory", "40"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(
        "7,050,304,512 parameters, 6,759,395,328 of them trained (vision_tower 290,909,184 frozen"
    )
    header = next(line for line in lines if line.startswith("GB per GPU"))
    assert all(name in header for name in ("ZeRO-0", "ZeRO-1", "ZeRO-2", "[ZeRO-3]", "3 + cpu all", "3 + nvme"))
    assert next(line for line in lines if line.startswith("in 40 GB")).count("too big") >= 3
    assert "ZeRO-3 on 4 GPUs needs" in lines[-1] and "smallest change that fits: --gradient_checkpointing" in lines[-1]


def test_flags_of_training_mean_the_same_here(figures):
    """A recipe's batch is shared out as on these GPUs, and the command line wins over it."""
    recipe = ("--model", "llava-v1.5-7b", "--recipe", str(ROOT / "run/recipes/llava-v1.5-7b-finetune.yaml"))
    found = figures(*recipe, "--num_gpus", "32", "--gradient_checkpointing", "True")
    assert found["micro_batch"] == {
        "num_tokens": 4 * 2048, "num_supervised": 2048, "num_tiles": 14, "num_recomputed": 32, "mlp_tokens": None
    }  # fmt: skip
    found = figures(*recipe, "--num_gpus", "4", "--tokens_per_micro_batch", "4096", "--gradient_checkpointing", "False")
    assert found["micro_batch"]["num_tokens"] == 4096 and found["micro_batch"]["num_recomputed"] == 0
    assert found["setup"]["accumulates"]


def test_auto_is_shown_as_what_it_would_choose(main, capsys):
    flags = ["--model", "llava-v1.5-7b", "--num_gpus", "8", "--tokens_per_micro_batch", "auto"]
    auto = [*flags, "--per_device_train_batch_size", "16", "--gradient_checkpointing", "auto"]
    said = []
    for memory in ([], ["--gpu_memory", "80"], ["--gpu_memory", "40"]):
        main([*auto, *memory])
        said.append(next(line for line in capsys.readouterr().out.splitlines() if line.startswith("auto (")))
    assert "give --gpu_memory" in said[0]
    # 80 GB have room for a full micro-batch of 8,192 tokens that keeps everything, 40 GB for one of them recomputed.
    tokens, again = ([int(n.replace(",", "")) for n in re.findall(r"[\d,]*\d", line)[:2]] for line in said[1:])
    assert tokens[0] > 8192 and tokens[1] == 0
    assert again[0] == 8192 and 0 < again[1] <= 32


def test_stage_1_trains_the_projector_alone(figures):
    found = figures("--model", "llava-v1.5-7b", "--tune_mm_mlp_adapter", "True")
    assert found["num_trained"] == found["parameters"]["projector"]["num_parameters"] == 20_979_712
    assert found["chosen"] == "ZeRO-2"


def test_the_deepspeed_json_says_stage_precision_and_sizes(figures, toy_base, tmp_path):
    folders = [token for name, value in toy_base.items() for token in (f"--{name}", value)]
    flags = [*folders, "--num_gpus", "2", "--model_max_length", "512"]
    found = figures(*flags, "--deepspeed_config", ds_config(2))
    assert (found["chosen"], found["setup"]["weight_bytes"]) == ("ZeRO-2", 4)
    assert found["setup"]["zero"]["reduce_bucket_size"] == 50_000_000
    assert figures(*flags)["setup"]["weight_bytes"] == 2
    assert figures(*flags, "--bf16", "False")["setup"]["weight_bytes"] == 4
    accumulated = tmp_path / "fp32.json"
    accumulated.write_text(
        json.dumps({**json.loads(Path(ds_config(1)).read_text()), "data_types": {"grad_accum_dtype": "fp32"}})
    )
    found = figures(*flags, "--deepspeed_config", str(accumulated), "--bf16", "True")
    assert (found["setup"]["weight_bytes"], found["setup"]["gradient_bytes"]) == (2, 4)


def test_the_tiny_model_needs_no_name(figures):
    assert figures()["num_parameters"] == 1_809_536


@pytest.mark.parametrize("path", sorted((ROOT / "ds_configs").glob("*.json")), ids=lambda path: path.stem)
def test_every_json_of_this_repository_is_estimated_without_an_output_folder(main, figures, capsys, path):
    flags = ("--model", "qwen2-0.5b", "--deepspeed_config", str(path))
    main(flags)
    lines = capsys.readouterr().out.splitlines()
    header = next(line for line in lines if line.startswith("GB per GPU"))
    found = figures(*flags)
    assert f"[{found['chosen']}]" in header and len(found["bytes"]) == 8
    zero = json.loads(path.read_text())["zero_optimization"]
    assert ("cpu" in found["chosen"] or "nvme" in found["chosen"]) == ("offload_optimizer" in zero)


def test_parameters_offloaded_alone_leave_the_optimizer_on_the_gpu(figures, tmp_path):
    path = tmp_path / "param.json"
    path.write_text(json.dumps({"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}))
    found = figures("--model", "13e9", "--deepspeed_config", str(path), "--bf16", "True")
    assert found["chosen"] == "3 + cpu param" and len(found["bytes"]) == 9
    column = found["bytes"]["3 + cpu param"]
    assert column["optimizer"] == 12 * 13 * 10**9 / 8 and column["gradients"] == 2 * 13 * 10**9 / 8
    assert column["weights"] == 0 and column["cpu"] == 2 * 13 * 10**9


def test_the_largest_that_is_estimated_keeps_its_columns_apart(main, capsys):
    started = time.monotonic()
    main(["--model", "1e14", "--num_gpus", "100000", "--gpus_per_node", "100000", "--gpu_memory", "80"])
    assert time.monotonic() - started < 20  # seconds; looking at every rank took hours
    lines = capsys.readouterr().out.splitlines()
    table = lines[next(i for i, line in enumerate(lines) if line.startswith("GB per GPU")) : -1]
    assert len({len(line) for line in table}) == 1
    assert all(len(line[22:].split()) == 8 for line in table if line.startswith(("weights", "= GPU", "CPU")))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--model", "7b"], "--model 7b is unknown: choose from llava-v1.5-7b"),
        (["--model", "1e30"], "--model 1e30 has more parameters than can be estimated: give 1e+14 or fewer"),
        (["--num_gpus", "0"], "--num_gpus is 0: give 1 or more"),
        (["--num_gpus", "100000000"], "--num_gpus is 100000000: give 100,000 or fewer"),
        (["--gpus_per_node", "0"], "--gpus_per_node is 0: give 1 or more"),
        (["--gpu_memory", "-1"], "--gpu_memory is -1: give a value above 0"),
        (["--gpu_memory", "nan"], "--gpu_memory is nan: give a value above 0"),
        (["--supervised_fraction", "2"], "--supervised_fraction is 2: give a value from 0 to 1"),
        (["--model", "13e9", "--vision_tower", str(ROOT)], "--model names a size, --model_name_or_path"),
        (["--vision_tower", str(ROOT)], "--vision_tower goes with --model_name_or_path"),
        (["--zero_stage", "2", "--deepspeed_config", ds_config(2)], "--zero_stage and --deepspeed_config both name"),
        (["--tokens_per_micro_batch", "0"], "--tokens_per_micro_batch is 0: give 1 or more"),
        (["--train_batch_size", "9"], "train_batch_size is 9, but 8 ranks can't share it evenly"),
        (["--deepspeed_config", "nowhere.json"], "--deepspeed_config nowhere.json can't be read"),
        (["--learning_rat", "1"], "unknown flag --learning_rat: did you mean --learning_rate?"),
        (["--num_gpu", "1"], "unknown flag --num_gpu: did you mean --num_gpus?"),
    ],
)
def test_bad_input_is_said_with_what_to_do(main, flags, message):
    with pytest.raises(ConfigError) as caught:
        main(flags)
    assert message in str(caught.value)


@pytest.mark.parametrize("family", toys.FAMILIES)
def test_every_family_is_counted_and_other_layers_than_llamas_are_said(family, main, capsys, tmp_path):
    base = toys.write_base(tmp_path, family=family)
    with safe_open(Path(base["model_name_or_path"]) / "model.safetensors", framework="pt") as written:
        size = sum(math.prod(written.get_slice(name).get_shape()) for name in written.keys())
    main([token for name, value in base.items() for token in (f"--{name}", value)])
    lines = capsys.readouterr().out.splitlines()
    assert f"language_model {size:,})" in lines[0]
    others = family not in ("llama", "qwen2", "qwen2_5", "mistral", "granite")
    assert ("but this model's differ: a guide only" in lines[2]) == others


def test_a_language_model_that_training_refuses_is_refused(main, tmp_path):
    base = toys.write_base(tmp_path)
    BloomConfig(vocab_size=99, hidden_size=32, n_layer=2, n_head=4).save_pretrained(tmp_path / "bloom")
    with pytest.raises(ConfigError, match="It is a bloom: its attention"):
        main(["--model_name_or_path", str(tmp_path / "bloom"), "--vision_tower", base["vision_tower"]])


def test_every_problem_is_said_at_once(main):
    with pytest.raises(ConfigError) as caught:
        main(["--num_gpus", "0", "--gpu_memory", "0"])
    assert len(str(caught.value).splitlines()) == 2


@pytest.mark.full
def test_as_a_command_it_exits_with_2_and_gives_nothing_but_json():
    environment = {name: value for name, value in os.environ.items() if name != "DS_ACCELERATOR"}

    def run(*flags: str) -> subprocess.CompletedProcess:
        return subprocess.run([sys.executable, SCRIPT, *flags], capture_output=True, text=True, env=environment)

    bad = run("--model", "7b")
    assert bad.returncode == 2 and "Traceback" not in bad.stderr and bad.stderr.startswith("run/estimate.py: error: ")
    good = run("--model", "13e9", "--json")
    assert good.returncode == 0 and json.loads(good.stdout)["num_parameters"] == 13 * 10**9


def test_rows_that_the_flags_add_are_counted(figures, tmp_path):
    base = toys.write_base(tmp_path)
    toys.add_plain_tokens(Path(base["model_name_or_path"]), "<left>", "<right>", "<grasp>")
    flags = [token for name, value in base.items() for token in (f"--{name}", value)]

    def states(*more: str) -> int:
        return figures(*flags, "--num_gpus", "1", *more)["bytes"]["ZeRO-0"]["model_states"]

    grown = ["--resize_token_embeddings", "True"]
    of_a_row = 2 * 32 * 16  # embedding and output layer, 32 wide: weights, gradients and Adam's states
    assert states(*grown) == states() + 3 * of_a_row
    assert states(*grown, "--pad_embeddings_to_multiple_of", "64") == states() + (448 - 400) * of_a_row
