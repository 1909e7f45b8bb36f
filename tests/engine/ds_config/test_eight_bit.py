"""bitsandbytes' 8-bit AdamW by flag and by JSON: the same optimizer under all its names, or refused with the reason."""

import pytest
from ds_json import arguments, refused, resolve

from llava_ds.checkpoint.comparison import Comparison
from llava_ds.checkpoint.reshard import WHOLE
from llava_ds.checkpoint.run_identity import RunIdentity
from llava_ds.constants import ConfigError
from llava_ds.engine.ds_config import optimizer_block
from llava_ds.engine.ds_config.optimizer import num_moments
from llava_ds.engine.ds_config.parallel import for_engine

J = "in the DeepSpeed JSON"


def block(name: str, stage: int = 2, **params: object) -> dict:
    return {"zero_optimization": {"stage": stage}, "optimizer": {"type": name, "params": params}}


@pytest.mark.parametrize("flag", ["adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit"])
def test_the_flag_names_the_optimizer_that_the_engine_gets_built(flag):
    resolved = resolve({"zero_optimization": {"stage": 2}}, optim=flag, weight_decay=0.1, adam_beta2=0.95)
    name = "PagedAdamW8bit" if "paged" in flag else "AdamW8bit"
    params = {"lr": 2e-5, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}
    assert resolved.config["optimizer"] == {"type": name, "params": params}
    assert resolved.config["zero_allow_untested_optimizer"] is True
    assert "optimizer" not in for_engine(resolved.config)
    assert num_moments(resolved.config) == 2 * (1 + 4 / 256) / 4  # of fp32: a byte each, and a scale for 256


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("AdamW8bit", "AdamW8bit"),
        ("Adam8bit", "AdamW8bit"),
        ("adamw_8bit", "AdamW8bit"),
        ("adamw_bnb_8bit", "AdamW8bit"),
        ("PagedAdamW8bit", "PagedAdamW8bit"),
        ("paged_adamw_8bit", "PagedAdamW8bit"),
        ("PAGEDADAM8BIT", "PagedAdamW8bit"),
    ],
)
def test_the_json_may_use_bitsandbytes_names_and_huggingfaces(name, meant):
    resolved = resolve(block(name, lr="auto", weight_decay="auto"), learning_rate=1e-3)
    assert resolved.config["optimizer"]["type"] == meant
    assert resolved.config["optimizer"]["params"]["lr"] == 1e-3


@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_torch_fused"])
def test_torchs_adamw_is_what_there_is_without_the_flag(optim):
    assert "optimizer" not in resolve({"zero_optimization": {"stage": 2}}, optim=optim).config
    assert resolve(block("AdamW"), optim=optim).config["optimizer"]["type"] == "AdamW"


@pytest.mark.parametrize(
    ("raw", "flags", "line"),
    [
        (
            block("Lion"),
            {"optim": "adamw_torch", "device_type": "cuda"},
            f"--optim adamw_torch and optimizer Lion {J} are two optimizers: leave one of them out",
        ),
        (
            block("AdamW"),
            {"optim": "paged_adamw_8bit"},
            f"--optim paged_adamw_8bit and optimizer AdamW {J} are two optimizers: leave one of them out",
        ),
        (
            block("PagedAdamW8bit"),
            {"optim": "adamw_8bit"},
            f"--optim adamw_8bit and optimizer PagedAdamW8bit {J} are two optimizers: leave one of them out",
        ),
        (
            block("AdamW8bit", amsgrad=True),
            {},
            f"optimizer.params.amsgrad {J} is unknown to AdamW8bit: it takes betas, eps, lr, weight_decay",
        ),
        (
            {**block("AdamW8bit"), "zero_allow_untested_optimizer": False},
            {},
            "DeepSpeed has not tested optimizer.type AdamW8bit under ZeRO-2: write "
            '"zero_allow_untested_optimizer": true to use it anyway',
        ),
        (
            {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}},
            {"optim": "adamw_8bit"},
            "--optim adamw_8bit with offload_optimizer: DeepSpeed's step in CPU memory works only for its own Adam "
            "with fp32 states: remove it, or give --optim paged_adamw_8bit",
        ),
        # Not bitsandbytes' AdamW: no hint at something else of that sound, and no line about its "auto".
        (
            block("Lion8bit", lr="auto"),
            {},
            f'optimizer.type "Lion8bit" {J} is unknown: give one of ASGD, Adadelta, Adafactor, Adagrad, Adam, AdamW, '
            "AdamW8bit, Adamax, Lamb, Lion, Muon, NAdam, PagedAdamW8bit, RAdam, RMSprop, Rprop, SGD",
        ),
    ],
)
def test_what_can_not_be_meant_is_refused(raw, flags, line):
    device = {"device_type": flags.pop("device_type", "cpu"), "is_local": False}
    assert refused(raw, **device, **flags) == [line]


def test_without_bitsandbytes_the_extra_is_named(monkeypatch):
    monkeypatch.setattr(optimizer_block, "find_spec", lambda name: None)
    install = "needs bitsandbytes, but it is not installed: pip install 'llava_ds[qlora]'"
    assert refused({"zero_optimization": {"stage": 2}}, optim="adamw_bnb_8bit") == [f"--optim adamw_8bit {install}"]
    assert refused(block("Adam8bit", lr="auto")) == [f"optimizer Adam8bit {install}"]
    assert resolve(block("Adam8bit"), is_local=False)  # a plan for another machine


@pytest.mark.parametrize("name", ["AdamW8bit", "PagedAdamW8bit"])
def test_states_are_not_brought_to_another_number_of_ranks(name, tmp_path):
    flags = dict.fromkeys(("group_by_length", "group_by_modality_length_auto", "group_by_varlen"), False)
    flags |= {"loss_reduction": "token", "steps_across_epochs": False}
    run = RunIdentity(flags, "data", 2, 2, {"optimizer": {"type": name}})
    saved = {"flags": flags, "data": "data", "world_size": 4, "zero_stage": 2, "deepspeed": run.deepspeed}
    reason = f"{name}'s 8-bit states have scales per block of a rank's shard, so its states can't be re-sharded"
    assert Comparison(run, saved).unfit_states(tmp_path) == (
        f"{tmp_path} can't be resumed: world_size is 2, was 4, but {reason}: start 4 ranks at ZeRO-2, or give --resume "
        "never to start again"
    )
    assert "scales per block" in WHOLE[name]


def test_other_values_of_the_flag_lead_to_the_json():
    with pytest.raises(ConfigError) as caught:
        arguments(optim="lion_8bit")
    assert str(caught.value) == (
        "--optim lion_8bit is unknown: give one of adamw_torch, adamw_torch_fused, adamw_8bit, adamw_bnb_8bit, "
        'paged_adamw_8bit, or name another optimizer in the DeepSpeed JSON, like "optimizer": {"type": "Lion"}'
    )
