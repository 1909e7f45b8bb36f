"""The schema's names are DeepSpeed's: what the installed version reads, and nothing else."""

import ast
import importlib
import inspect
import re

import pytest
from ds_json import CONFIGS, refused, resolve

from llava_ds.engine.ds_config.keys import REMOVED
from llava_ds.engine.ds_config.resolve import read_ds_config
from llava_ds.engine.ds_config.schema import (
    ActivationCheckpointing,
    Aio,
    Checkpoint,
    DeepSpeedJson,
    FlopsProfiler,
    fields_of,
)


def constants(module: str) -> dict[str, str]:
    """Names that DeepSpeed gives to keys, by the constant's name."""
    return {name: value for name, value in vars(importlib.import_module(module)).items() if isinstance(value, str)}


@pytest.mark.parametrize(
    ("section", "module", "prefix", "not_keys"),
    [
        (Aio, "deepspeed.runtime.swap_tensor.constants", "AIO_", {"AIO_FORMAT"}),
        (FlopsProfiler, "deepspeed.profiling.constants", "FLOPS_PROFILER_", {"FLOPS_PROFILER_FORMAT"}),
        (ActivationCheckpointing, "deepspeed.runtime.activation_checkpointing.config", "ACT_CHKPT_", set()),
    ],
)
def test_the_sections_written_out_have_deepspeeds_keys(section, module, prefix, not_keys):
    theirs = {v for k, v in constants(module).items() if k.startswith(prefix) and k not in not_keys}
    assert set(fields_of(section)) == theirs


def test_the_top_level_has_every_key_that_deepspeed_reads():
    source = inspect.getsource(importlib.import_module("deepspeed.runtime.config"))
    names = constants("deepspeed.runtime.config") | constants("deepspeed.runtime.constants")
    read = set()
    for node in ast.walk(ast.parse(source)):  # get_scalar_param(param_dict, KEY, ...) and param_dict.get("key", ...)
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        arguments = node.args[1:2] if called == "get_scalar_param" else node.args[:1]
        on_the_top = called == "param_dict.get" or (
            called == "get_scalar_param" and ast.unparse(node.args[0]) == "param_dict"
        )
        if on_the_top and arguments and not called.endswith("zero_config_dict"):
            key = arguments[0]
            read.add(key.value if isinstance(key, ast.Constant) else names.get(ast.unparse(key)))
    assert len(read) > 20
    of_axes = {"sequence_parallel_size", "tensor_parallel", "pipeline"}  # extensions read them
    assert read - {None, "loss_scale"} <= set(fields_of(DeepSpeedJson)) | of_axes


def test_everything_deepspeed_says_it_removed_is_named():
    from deepspeed.runtime import config

    theirs = set(config._REMOVED_TOP_LEVEL_CONFIG_KEYS)
    theirs |= {f"zero_optimization.{key}" for key in config._REMOVED_ZERO_CONFIG_KEYS}
    assert theirs == set(REMOVED)


@pytest.mark.parametrize("key", sorted(REMOVED))
def test_a_key_that_is_gone_is_said_to_be_gone(key):
    section, _, name = key.rpartition(".")
    raw = {section: {name: 1}} if section else {name: {"enabled": True}}
    assert refused(raw) == [f"{key} in the DeepSpeed JSON is gone from DeepSpeed 0.19: {REMOVED[key]}"]


def test_checkpoint_keys_are_those_of_deepspeeds_own_example():
    from deepspeed.runtime.model_checkpointing.constants import CHECKPOINT_FORMAT

    shown = set(re.findall(r'^  "(\w+)":', CHECKPOINT_FORMAT, re.MULTILINE))
    assert shown <= set(fields_of(Checkpoint))


def test_nulls_are_keys_that_are_not_there():
    config = resolve({"zero_optimization": {"stage": 2, "sub_group_size": None}, "aio": None, "bf16": None}).config
    assert "aio" not in config and config["zero_optimization"] == {"stage": 2}


def test_alias_and_name_of_a_key_are_both_known():
    for name in ("gather_16bit_weights_on_model_save", "stage3_gather_16bit_weights_on_model_save"):
        resolve({"zero_optimization": {"stage": 3, name: True}})


def test_our_files_hold_only_what_deepspeed_reads():
    files = sorted(CONFIGS.glob("*.json"))
    assert len(files) == 7
    for path in files:
        stage = int(path.stem[4])
        config = resolve(read_ds_config(path), is_local=False).config
        assert config["zero_optimization"]["stage"] == stage
