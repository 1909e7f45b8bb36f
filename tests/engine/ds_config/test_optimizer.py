"""The optimizer block: filled from the flags, or refused before a model is built."""

import pytest
from ds_json import arguments, refused, resolve

from llava_ds.engine.ds_config import native_ops as native
from llava_ds.engine.ds_config.draft import Draft
from llava_ds.engine.ds_config.resolve import resolve_optimizer

UNTESTED = {"zero_allow_untested_optimizer": True}


def block(name: str, stage: int = 1, **params: object) -> dict:
    return {"zero_optimization": {"stage": stage}, "optimizer": {"type": name, "params": params}}


@pytest.fixture
def tools(monkeypatch):
    """Says which build tools there are."""

    def there(*names: str) -> None:
        found = {"c++": "g++", "ninja": "ninja", "nvcc": "nvcc"}
        monkeypatch.delenv("CXX", raising=False)
        monkeypatch.setattr("torch.utils.cpp_extension.CUDA_HOME", None)
        monkeypatch.setattr(native.shutil, "which", lambda tool: found.get(tool) in names or None)

    return there


def offloaded(raw: dict, **flags: object):
    """The optimizer's part by itself, with states in CPU memory."""
    raw = raw | {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
    draft = Draft(raw, arguments(**flags), dp=1, hidden_size=48, device_type="cuda", is_local=True)
    resolve_optimizer(draft)
    return draft


def test_auto_is_filled_from_the_flags_as_hugging_face_does():
    auto = dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")
    flags = {"learning_rate": 3e-4, "adam_beta1": 0.8, "adam_beta2": 0.95, "adam_epsilon": 1e-6, "weight_decay": 0.1}
    params = resolve(block("AdamW", **auto), **flags).config["optimizer"]["params"]
    assert params == {"lr": 3e-4, "betas": [0.8, 0.95], "eps": 1e-6, "weight_decay": 0.1, "torch_adam": True}


@pytest.mark.parametrize(
    ("name", "filled"),
    [
        ("AdamW", {"lr", "betas", "eps", "weight_decay", "torch_adam"}),
        ("NAdam", {"lr", "betas", "eps", "weight_decay"}),
        ("Muon", {"lr", "betas", "eps", "weight_decay", "torch_adam"}),
        ("SGD", {"lr", "weight_decay"}),
        ("Adagrad", {"lr", "weight_decay"}),  # its epsilon is not Adam's
        ("Adafactor", {"lr", "weight_decay"}),
        ("Rprop", {"lr"}),
    ],
)
def test_what_the_block_leaves_out_is_filled_where_the_class_knows_it(name, filled):
    resolved = resolve(block(name) | UNTESTED, learning_rate=3e-4)
    params = resolved.config["optimizer"]["params"]
    assert set(params) == filled and params["lr"] == 3e-4
    assert all(f"optimizer.params.{key}" in resolved.reasons for key in filled)


def test_an_epsilon_that_says_auto_is_adams_for_every_optimizer():
    assert resolve(block("Adagrad", eps="auto"), adam_epsilon=1e-6).config["optimizer"]["params"]["eps"] == 1e-6


def test_values_of_the_json_become_the_flags_from_which_the_groups_are_made():
    training = resolve(block("AdamW", lr=1e-3, betas=[0.7, 0.9], eps=1e-5, weight_decay=0.2)).args.training
    assert (training.learning_rate, training.weight_decay) == (1e-3, 0.2)
    assert (training.adam_beta1, training.adam_beta2, training.adam_epsilon) == (0.7, 0.9, 1e-5)


def test_the_schedules_rate_and_the_optimizers_are_one():
    schedule = {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 5e-4}}}
    resolved = resolve(block("AdamW", lr="auto") | schedule)
    assert resolved.config["optimizer"]["params"]["lr"] == 5e-4 == resolved.args.training.learning_rate
    line = (
        "optimizer.params.lr is 0.001 in the DeepSpeed JSON but scheduler.params.warmup_max_lr is 0.0005 and would "
        'overwrite it: make them equal, or write "auto" for one'
    )
    assert line in refused(block("AdamW", lr=1e-3) | schedule)


def test_conflicts_name_flag_key_and_both_values():
    flags = {"learning_rate": 2e-3, "weight_decay": 0.5, "adam_beta2": 0.98, "adam_epsilon": 1e-7}
    lines = refused(block("AdamW", lr=1e-3, weight_decay=0.1, betas=[0.9, 0.99], eps=1e-8), **flags)
    same = 'make them equal, or write "auto"'
    assert lines == [
        f"optimizer.params.lr is 0.001 in the DeepSpeed JSON but --learning_rate is 0.002: {same}",
        f"optimizer.params.weight_decay is 0.1 in the DeepSpeed JSON but --weight_decay is 0.5: {same}",
        "optimizer.params.betas is [0.9, 0.99] in the DeepSpeed JSON but --adam_beta1 --adam_beta2 is [0.9, 0.98]: "
        + same,
        f"optimizer.params.eps is 1e-08 in the DeepSpeed JSON but --adam_epsilon is 1e-07: {same}",
    ]


NEVER = "optimizer.type {} in the DeepSpeed JSON can't train here, because {}: use AdamW"
WRONG = [
    (block("AdamWW"), 'optimizer.type "AdamWW" in the DeepSpeed JSON is unknown: did you mean AdamW'),
    (block("Rmsprob"), 'optimizer.type "Rmsprob" in the DeepSpeed JSON is unknown: did you mean RMSprop'),
    (block("xyz"), 'optimizer.type "xyz" in the DeepSpeed JSON is unknown: give one of ASGD, Adadelta'),
    (
        block("sgd"),
        'optimizer.type "sgd" in the DeepSpeed JSON is unknown: did you mean SGD',
    ),  # torch's in their own case
    (block("LBFGS"), NEVER.format("LBFGS", "it computes the loss again within a step")[:80]),
    (block("SparseAdam"), NEVER.format("SparseAdam", "it takes sparse gradients only")),
    (block("OneBitAdam"), NEVER.format("OneBitAdam", "DeepSpeed 0.19 has removed its 1-bit optimizers")),
    (block("onebitlamb"), NEVER.format("OneBitLamb", "DeepSpeed 0.19 has removed its 1-bit optimizers")),
    (block("MuAdam"), NEVER.format("MuAdam", "it needs a model with the mup package's base shapes")[:110]),
    (
        block("AdamW", weight_deacy=0.1),
        "optimizer.params.weight_deacy in the DeepSpeed JSON is unknown to AdamW: did you mean weight_decay?",
    ),
    (
        block("Adagrad", xyz=1),
        "optimizer.params.xyz in the DeepSpeed JSON is unknown to Adagrad: it takes differentiable, eps",
    ),
    (
        block("AdamW", max_grad_norm=1.0),
        "optimizer.params.max_grad_norm in the DeepSpeed JSON is not supported by DeepSpeed: write gradient_clipping",
    ),
    (block("Muon", per_head_muon=True), "optimizer.params.per_head_muon in the DeepSpeed JSON has no effect"),
    (block("AdamW", lr=-1), 'optimizer.params.lr is -1 in the DeepSpeed JSON: write a number from 0, or "auto"'),
    (
        block("AdamW", betas=[0.9, 1.5]),
        "optimizer.params.betas is [0.9, 1.5] in the DeepSpeed JSON: give numbers below 1",
    ),
    (block("AdamW", betas=0.9), "optimizer.params.betas is 0.9 in the DeepSpeed JSON: write a list of 2 numbers"),
    (block("AdamW", torch_adam=1), "optimizer.params.torch_adam is 1 in the DeepSpeed JSON: write true or false"),
    (
        block("SGD", momentum=1) | UNTESTED,
        "optimizer.params.momentum is 1 in the DeepSpeed JSON: write a number from 0 to below 1",
    ),
    (
        block("SGD", nesterov=True) | UNTESTED,
        "optimizer.params in the DeepSpeed JSON: SGD rejects them (Nesterov momentum requires a momentum",
    ),
    (
        block("Muon", momentum="big"),
        'optimizer.params.momentum is "big" in the DeepSpeed JSON: write a number from 0 to below 1',
    ),
    (block("Muon", ns_method="fast"), 'optimizer.params.ns_method is "fast" in the DeepSpeed JSON: write gram or'),
    (block("Muon", muon_lr="x"), 'optimizer.params.muon_lr is "x" in the DeepSpeed JSON: write a number from 0'),
    (
        block("AdamW", adam_w_mode=False),
        "optimizer.params.adam_w_mode is false, but DeepSpeed ignores it for type AdamW: write type Adam",
    ),
    (
        block("AdamW", amsgrad=True, torch_adam=False),
        'optimizer.params.amsgrad is true, but DeepSpeed\'s own Adam lacks it: add "torch_adam": true',
    ),
    (
        block("SGD", stage=3),
        "DeepSpeed has not tested optimizer.type SGD under ZeRO-3: write "
        '"zero_allow_untested_optimizer": true to use it anyway',
    ),
    (
        block("Muon", stage=3),
        'Muon needs whole gradients at ZeRO-3: write "reduce_scatter": false into zero_optimization, or use stage 2',
    ),
    (
        block("Muon") | {"gradient_clipping": 1.0},
        "gradient_clipping is 1.0, but under ZeRO-1 DeepSpeed clips Muon's updates instead of gradients: give "
        "--max_grad_norm 0 or use stage 0",
    ),
    (block("Lamb"), "Lamb has a kernel for GPUs only, and this machine has none: use AdamW"),
    (block("lion"), "Lion has a kernel for GPUs only, and this machine has none: use AdamW"),
    (block("AdamW", eps="small"), 'optimizer.params.eps is "small" in the DeepSpeed JSON: write a number from 0'),
]


@pytest.mark.parametrize(("raw", "expected"), WRONG, ids=range(len(WRONG)))
def test_a_block_that_can_not_train_is_refused(raw, expected):
    lines = refused(raw)
    assert any(line.startswith(expected) for line in lines), lines


def test_a_decay_that_the_optimizer_does_not_know_is_refused():
    line = "--weight_decay is 0.1, but Rprop has no decay: give 0, or another optimizer"
    assert line in refused(block("Rprop") | UNTESTED, weight_decay=0.1)


def test_deepspeeds_names_go_in_any_case_and_what_sees_shards_says_so():
    assert resolve(block("adamw", torch_adam=True)).config["optimizer"]["type"] == "adamw"
    assert "number of ranks" in resolve(block("Adafactor") | UNTESTED).reasons["optimizer.type"]
    assert "optimizer.type" not in resolve(block("Adafactor", stage=0)).reasons


def test_muon_takes_clipping_where_gradients_are_clipped_before_it():
    resolve(block("Muon", stage=0) | {"gradient_clipping": 1.0})
    late = {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}, "gradient_clipping": 1.0}
    resolve(block("Muon", stage=1) | late)
    assert len(refused(block("Muon", stage=2) | late)) == 1


def test_muons_autocast_in_float16_is_refused_where_updates_are_scaled():
    line = 'torch_autocast in float16 under ZeRO-1 divides Muon\'s updates by the loss scale: write "dtype": "bfloat16"'
    raw = block("Muon", torch_adam=True) | {"torch_autocast": {"enabled": True, "dtype": "float16"}}
    assert line in refused(raw, device_type="cuda")


@pytest.mark.parametrize("name", ["Adam", "AdamW", "Muon"])
def test_torch_computes_adam_where_deepspeed_would_have_to_compile_it_and_can_not(name, tools):
    tools("g++", "ninja", "nvcc")
    assert "torch_adam" not in resolve(block(name), device_type="cuda").config["optimizer"]["params"]
    tools("g++", "ninja")
    resolved = resolve(block(name), device_type="cuda")
    assert resolved.config["optimizer"]["params"]["torch_adam"] is True
    assert resolved.reasons["optimizer.params.torch_adam"] == "nvcc is missing; torch's computes the same"
    assert resolve(block(name, torch_adam=False)).config["optimizer"]["params"]["torch_adam"] is False


def test_what_only_deepspeeds_adam_knows_is_left_to_it(tools):
    tools("g++", "ninja")
    assert "torch_adam" not in resolve(block("AdamW", bias_correction=False)).config["optimizer"]["params"]
    tools("g++")
    assert refused(block("AdamW", bias_correction=False)) == [
        'DeepSpeed compiles AdamW when it starts, and needs ninja for it: install it, or write "torch_adam": true '
        "into optimizer.params"
    ]


@pytest.mark.parametrize("name", ["Lamb", "Lion"])
def test_kernels_for_gpus_need_their_compiler(name, tools):
    tools("ninja")
    raw = block(name, stage=0)
    assert refused(raw, device_type="cuda") == [
        f"DeepSpeed compiles {name} when it starts, and needs nvcc and g++ for it: install them, or use AdamW with "
        "torch_adam"
    ]
    tools("ninja", "g++", "nvcc")
    resolve(raw, device_type="cuda")


def test_muons_update_needs_a_compiler_or_to_be_told_so(tools, monkeypatch):
    tools("ninja")
    monkeypatch.delenv("TORCH_COMPILE_DISABLE", raising=False)
    raw = block("Muon", torch_adam=True)
    assert refused(raw) == [
        "torch compiles Muon's update when training starts, and needs g++ for it: install it, or set "
        "TORCH_COMPILE_DISABLE=1 in the environment"
    ]
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")
    resolve(raw)


def test_lamb_wants_a_dynamic_loss_scale(tools):
    tools("ninja", "g++", "nvcc")
    fp16 = {"fp16": {"enabled": True, "loss_scale": 128}}
    line = "fp16.loss_scale is 128, but DeepSpeed's Lamb needs a dynamic loss scale: write 0"
    assert line in refused(block("Lamb", stage=0) | fp16, device_type="cuda")


def test_without_a_block_nothing_is_filled_but_under_offload_deepspeeds_cpu_adam(tools):
    tools("g++", "ninja", "nvcc")
    assert "optimizer" not in resolve({}).config
    draft = offloaded({}, learning_rate=3e-4)
    assert draft.config["optimizer"]["type"] == "AdamW" and draft.config["optimizer"]["params"]["lr"] == 3e-4
    assert "torch_adam" not in draft.config["optimizer"]["params"] and not draft.problems
    assert draft.reasons["optimizer.type"] == "under offload DeepSpeed's CPU Adam is fastest"
    assert "optimizer" not in offloaded({"zero_force_ds_cpu_optimizer": False}).config


def test_offload_without_a_compiler_says_how_to_go_on(tools):
    tools("ninja", "nvcc")
    needs = "when it starts, and needs g++ for it: install it, or"
    assert offloaded({}).problems == [
        f'DeepSpeed compiles AdamW {needs} write "zero_force_ds_cpu_optimizer": false to let torch compute AdamW'
    ]
    by_torch = 'write "torch_adam": true into optimizer.params'
    for name, instead in (("AdamW", by_torch), ("Muon", by_torch), ("Lion", "use AdamW with")):
        assert (
            offloaded({"optimizer": {"type": name}})
            .problems[-1]
            .startswith(f"DeepSpeed compiles {name} {needs} {instead}")
        )
    assert offloaded({"optimizer": {"type": "AdamW", "params": {"torch_adam": True}}}).problems == []


def test_lamb_can_not_be_offloaded(tools):
    tools("g++", "ninja", "nvcc")
    problems = offloaded({"optimizer": {"type": "Lamb"}, **UNTESTED}).problems
    assert problems == ["Lamb has no kernel for offloaded states: use AdamW, or remove offload_optimizer"]
    assert offloaded({"optimizer": {"type": "Lion"}}).problems == []
