"""The optimizer block of the JSON, checked and filled from the flags."""

import inspect
import os
from importlib.util import find_spec

import torch

from llava_ds.constants import did_you_mean
from llava_ds.engine.ds_config.draft import AUTO, Draft, as_json, is_number, trial_error
from llava_ds.engine.ds_config.native_ops import compiler, missing_tools
from llava_ds.engine.ds_config.optimizer import (
    BITSANDBYTES,
    EIGHT_BIT_NAMES,
    FROM_FLAGS,
    OPTIMIZERS,
    SHARDED,
    TORCH,
    WITH_ADAM,
    kernel_of,
    offloads,
    optimizer_name,
)
from llava_ds.engine.ds_config.precision import DTYPES
from llava_ds.engine.ds_config.scheduler import RATE_KEYS

EIGHT_BIT_PARAMS = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
# Optimizers of torch and of this or earlier versions of DeepSpeed that can't be used here, with the reason.
IMPOSSIBLE = {
    "LBFGS": "it computes the loss again within a step, but DeepSpeed's engine can't",
    "SparseAdam": "it takes sparse gradients only",
    "Optimizer": "it is torch's base class",
    **{name: "DeepSpeed 0.19 has removed its 1-bit optimizers" for name in ("OneBitAdam", "ZeroOneAdam", "OneBitLamb")},
    **{
        name: "it needs a model with the mup package's base shapes, and this trainer does not build one"
        for name in ("MuAdam", "MuAdamW", "MuSGD")
    },
}
# Parameters that DeepSpeed handles itself. It passes the others to the optimizer's class.
ADAM_EXTRAS = {"torch_adam": False, "adam_w_mode": True, "fp32_optimizer_states": True}
MUON_PARAMS = {
    **{"lr": 2e-2, "muon_lr": 2e-2, "adam_lr": 3e-4, "momentum": 0.95, "weight_decay": 0.0, "ns_method": "gram"},
    **{"betas": (0.9, 0.95), "eps": 1e-10},
}
NS_METHODS = ("gram", "standard")
GRAPHS = ("capturable", "differentiable")
BELOW_ONE = ("momentum", "rho", "alpha", "initial_accumulator_value")


def resolve_block(draft: Draft) -> None:
    """Fill in the block from the flags, and refuse optimizers and parameters that can't be used."""
    optim = draft.args.training.optim
    block = draft.config["optimizer"]
    if not isinstance(block.get("type"), str):
        return  # check_keys refused it
    params = block.setdefault("params", {})
    name = optimizer_name(block)
    if not _is_known(draft, name):
        return
    if "optim" in draft.args.given and EIGHT_BIT_NAMES.get(optim, "AdamW") != ("AdamW" if name == "Adam" else name):
        draft.refuse(
            f"--optim {optim} and optimizer {block['type']} in the DeepSpeed JSON are two optimizers: leave one of "
            "them out"
        )
    if name in BITSANDBYTES:
        _set_eight_bits(draft, block, name)
    _set_torch_adam(draft, name, params)
    known = known_params(name, torch_adam=params.get("torch_adam") is True, offload=offloads(draft))
    _check_params(draft, name, params, known)
    _fill_params(draft, params, known)
    _check_stage(draft, name)
    _check_tools(draft, name, params)
    if name in TORCH or name == "Adagrad" or params.get("torch_adam") is True:
        _try_torch_class(draft, name, params)


def known_params(name: str, *, torch_adam: bool, offload: bool) -> dict[str, object]:
    """Return the parameters that a type of optimizer accepts in the JSON, with their defaults."""
    if name == "Muon":
        return MUON_PARAMS | ADAM_EXTRAS
    if name in BITSANDBYTES:
        return EIGHT_BIT_PARAMS
    of_class = inspect.signature(_class_of(name, torch_adam, offload).__init__).parameters
    params = {key: p.default for key, p in of_class.items() if key not in ("self", "params", "model_params")}
    if name in ("Adam", "AdamW"):
        # DeepSpeed itself sets its classes' argument for AdamW's weight decay.
        params = {key: default for key, default in params.items() if key not in ("adam_w_mode", "adamw_mode")}
        params |= ADAM_EXTRAS
    params.pop("max_grad_norm", None)
    return params


def _class_of(name: str, torch_adam: bool, offload: bool) -> type:
    import deepspeed.ops as ops
    from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
    from deepspeed.ops.lamb import FusedLamb
    from deepspeed.ops.lion import DeepSpeedCPULion, FusedLion

    adam = ops.adam.DeepSpeedCPUAdam if offload else ops.adam.FusedAdam
    own = {
        "Adam": adam,
        "AdamW": adam,
        "Adagrad": DeepSpeedCPUAdagrad if offload else torch.optim.Adagrad,
        "Lamb": FusedLamb,
        "Lion": DeepSpeedCPULion if offload else FusedLion,
    }
    by_torch = name not in own or (torch_adam and name in ("Adam", "AdamW"))
    return getattr(torch.optim, name) if by_torch else own[name]


def _is_known(draft: Draft, name: str) -> bool:
    if name in OPTIMIZERS:
        return True
    impossible = next((each for each in IMPOSSIBLE if each.lower() == name.lower()), None)
    if impossible is not None:
        why = IMPOSSIBLE[impossible]
        draft.refuse(f"optimizer.type {impossible} in the DeepSpeed JSON can't train here, because {why}: use AdamW")
    else:
        hint = did_you_mean(name.rpartition(".")[2], OPTIMIZERS, f"give one of {', '.join(sorted(OPTIMIZERS))}")
        draft.refuse(f"optimizer.type {as_json(name)} in the DeepSpeed JSON is unknown: {hint}")
    draft.wrong.add("optimizer.type")
    return False


def _set_torch_adam(draft: Draft, name: str, params: dict) -> None:
    """Use torch's Adam if DeepSpeed can't compile its own, and on a CPU, because DeepSpeed's is no faster there."""
    if name not in WITH_ADAM or "torch_adam" in params or offloads(draft):
        return
    own = set(params) - set(known_params(name, torch_adam=True, offload=False))
    missing = missing_tools(draft.device_type, "fused_adam") if draft.is_local else []
    if own or (draft.device_type != "cpu" and not missing):
        return
    why = "DeepSpeed would compile an Adam for the CPU" if draft.device_type == "cpu" else f"{missing[0]} is missing"
    draft.fill("optimizer.params.torch_adam", True, f"{why}; torch's computes the same")


def _set_eight_bits(draft: Draft, block: dict, name: str) -> None:
    """Write bitsandbytes' name of the optimizer into the block, and allow the optimizer under ZeRO."""
    asked = (
        f"--optim {draft.args.training.optim}" if "optimizer.type" in draft.reasons else f"optimizer {block['type']}"
    )
    block["type"] = name
    if draft.is_local and find_spec("bitsandbytes") is None:
        draft.refuse(f"{asked} needs bitsandbytes, but it is not installed: pip install 'llava_ds[qlora]'")
    if offloads(draft):
        remedy = (
            "remove it, or take AdamW" if name.startswith("Paged") else "remove it, or give --optim paged_adamw_8bit"
        )
        draft.refuse(
            f"{asked} with offload_optimizer: DeepSpeed's step in CPU memory works only for its own Adam with fp32 "
            f"states: {remedy}"
        )
    if name.startswith("Paged") and draft.device_type == "cpu":
        draft.reasons["optimizer.type"] = f"{asked}; without a GPU states stay in memory, nothing is paged"
    if draft.is_open("zero_allow_untested_optimizer"):
        draft.fill("zero_allow_untested_optimizer", True, "bitsandbytes' AdamW is tested under ZeRO here")


def _check_params(draft: Draft, name: str, params: dict, known: dict[str, object]) -> None:
    for key, value in params.items():
        where = f"optimizer.params.{key}"
        if key == "max_grad_norm":
            draft.refuse(
                f"{where} in the DeepSpeed JSON is not supported by DeepSpeed: write gradient_clipping instead"
            )
        elif key == "per_head_muon":
            draft.refuse(
                f"{where} in the DeepSpeed JSON has no effect on a model of tower, projector and LLM: remove it"
            )
        elif key not in known:
            hint = did_you_mean(key, known, f"it takes {', '.join(sorted(known))}")
            draft.refuse(f"{where} in the DeepSpeed JSON is unknown to {name}: {hint}")
        elif value != AUTO and key not in FROM_FLAGS and (wanted := _wanted(key, known[key], value)):
            draft.refuse(f"{where} is {as_json(value)} in the DeepSpeed JSON: write {wanted}")
    if name == "AdamW" and params.get("adam_w_mode") is False:
        draft.refuse("optimizer.params.adam_w_mode is false, but DeepSpeed ignores it for type AdamW: write type Adam")
    if params.get("amsgrad") is True and "bias_correction" in known:
        draft.refuse('optimizer.params.amsgrad is true, but DeepSpeed\'s own Adam lacks it: add "torch_adam": true')


def _wanted(key: str, default: object, value: object) -> str | None:
    """Return a description of the valid values, or None if the value is valid."""
    if key in GRAPHS:
        return None if value is False else "false, or remove it: steps are never captured or differentiated"
    if isinstance(default, bool) or key in ("foreach", "fused"):
        return None if isinstance(value, bool) else "true or false"
    if key == "ns_method":
        return None if value in NS_METHODS else " or ".join(NS_METHODS)
    if key in BELOW_ONE:
        return None if is_number(value) and value < 1 else "a number from 0 to below 1"
    if isinstance(default, (int, float)) and default >= 0:
        return None if is_number(value) else "a number from 0"
    return None  # building the class checks the rest


def _fill_params(draft: Draft, params: dict, known: dict[str, object]) -> None:
    """Fill in rate and weight decay from the flags instead of the class's defaults. Betas and epsilon are filled in as
    well if the optimizer has betas, or if the JSON has these keys."""
    two_rates = not _one_rate(draft)
    for key, flags in FROM_FLAGS.items():
        if key not in known or not (key in ("lr", "weight_decay") or "betas" in known or key in params):
            continue
        if key == "eps" and not isinstance(known[key], float):
            continue  # Adafactor's eps is a pair with another meaning
        if key == "lr" and two_rates:
            continue
        value = draft.agree(f"optimizer.params.{key}", *flags)
        if key == "betas" and any(is_number(beta) and beta >= 1 for beta in value):
            draft.refuse(f"optimizer.params.betas is {as_json(value)} in the DeepSpeed JSON: give numbers below 1")
    if "weight_decay" not in known and draft.args.training.weight_decay > 0:
        draft.refuse(
            f"--weight_decay is {draft.args.training.weight_decay}, but {draft.get('optimizer.type')} has no decay: "
            "give 0, or another optimizer"
        )


def _one_rate(draft: Draft) -> bool:
    """If the JSON gives only the schedule's peak rate, use it for the optimizer. Refuses two different rates.

    Returns False if the rates differ.
    """
    key = RATE_KEYS.get(str(draft.get("scheduler.type")))
    rate, peak = draft.get("optimizer.params.lr"), key and draft.get(f"scheduler.params.{key}")
    if not is_number(peak):
        return True
    if is_number(rate) and rate != peak:
        draft.refuse(
            f"optimizer.params.lr is {as_json(rate)} in the DeepSpeed JSON but scheduler.params.{key} is "
            f'{as_json(peak)} and would overwrite it: make them equal, or write "auto" for one'
        )
        return False
    draft.agree(f"scheduler.params.{key}", "learning_rate")
    return True


def _check_stage(draft: Draft, name: str) -> None:
    stage = draft.get("zero_optimization.stage") or 0
    if stage and not OPTIMIZERS[name].zero_tested and draft.get("zero_allow_untested_optimizer") is not True:
        draft.refuse(
            f"DeepSpeed has not tested optimizer.type {name} under ZeRO-{stage}: write "
            '"zero_allow_untested_optimizer": true to use it anyway'
        )
    if stage and name in SHARDED:
        draft.reasons["optimizer.type"] = (
            f"sees shards instead of {SHARDED[name]} under ZeRO-{stage}: updates depend on the number of ranks"
        )
    if name == "Muon" and stage:
        _check_sharded_muon(draft, stage)
    if name == "Lamb" and draft.get("fp16.loss_scale") not in (None, 0):
        draft.refuse(
            f"fp16.loss_scale is {as_json(draft.get('fp16.loss_scale'))}, but DeepSpeed's Lamb needs a dynamic loss "
            "scale: write 0"
        )


def _check_sharded_muon(draft: Draft, stage: int) -> None:
    """Refuse settings that break Muon under ZeRO: DeepSpeed 0.19.8 applies it before it unscales or clips gradients."""
    if stage == 3 and draft.get("zero_optimization.reduce_scatter") is not False:
        draft.refuse(
            'Muon needs whole gradients at ZeRO-3: write "reduce_scatter": false into zero_optimization, or use stage 2'
        )
    late = draft.get("bf16.enabled") is True and draft.get("data_types.grad_accum_dtype") in DTYPES["fp32"]
    if draft.get("gradient_clipping") and not (late and stage == 1):
        draft.refuse(
            f"gradient_clipping is {as_json(draft.get('gradient_clipping'))}, but under ZeRO-{stage} DeepSpeed clips "
            "Muon's updates instead of gradients: give --max_grad_norm 0 or use stage 0"
        )
    if draft.get("torch_autocast.enabled") is True and draft.get("torch_autocast.dtype") in DTYPES["fp16"]:
        draft.refuse(
            f"torch_autocast in float16 under ZeRO-{stage} divides Muon's updates by the loss scale: write "
            '"dtype": "bfloat16"'
        )


def _check_tools(draft: Draft, name: str, params: dict) -> None:
    """Refuse an optimizer that has no kernel for the device, or whose kernel can't be compiled."""
    offload = offloads(draft)
    if name == "Lamb" and offload:
        draft.refuse("Lamb has no kernel for offloaded states: use AdamW, or remove offload_optimizer")
        return
    if draft.device_type == "cpu" and (name == "Lamb" or (name == "Lion" and not offload)):
        instead = "use AdamW" if name == "Lamb" else "use AdamW, or offload_optimizer to use its kernel for CPUs"
        draft.refuse(f"{name} has a kernel for GPUs only, and this machine has none: {instead}")
        return
    if not draft.is_local:
        return
    if name == "Muon" and os.environ.get("TORCH_COMPILE_DISABLE") != "1" and not compiler():
        draft.refuse(
            "torch compiles Muon's update when training starts, and needs g++ for it: install it, or set "
            "TORCH_COMPILE_DISABLE=1 in the environment"
        )
    op = kernel_of(name, params, offload)
    if op is not None and (missing := missing_tools(draft.device_type, op)):
        own_adam = name in WITH_ADAM
        instead = 'write "torch_adam": true into optimizer.params' if own_adam else "use AdamW with torch_adam"
        if offload and "optimizer.type" in draft.reasons:
            instead = 'write "zero_force_ds_cpu_optimizer": false to let torch compute AdamW'
        draft.refuse(
            f"DeepSpeed compiles {name} when it starts, and needs {' and '.join(missing)} for it: install "
            f"{'it' if len(missing) == 1 else 'them'}, or {instead}"
        )


def _try_torch_class(draft: Draft, name: str, params: dict) -> None:
    """Try torch's class with these parameters: build it on a tiny weight and take a step."""
    if name == "Muon" or draft.problems or (name == "Adagrad" and offloads(draft)):
        return
    values = {key: value for key, value in params.items() if key not in ADAM_EXTRAS}
    if name == "Adam" and params.get("adam_w_mode") is not False:
        name = "AdamW"  # DeepSpeed's Adam decays like AdamW by default

    def run() -> None:
        weight = torch.nn.Parameter(torch.zeros(2))
        weight.grad = torch.ones(2)
        getattr(torch.optim, name)([weight], **values).step()

    if problem := trial_error(run):
        draft.refuse(f"optimizer.params in the DeepSpeed JSON: {name} rejects them ({problem})")
