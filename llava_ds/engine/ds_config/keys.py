"""Whether the keys of a DeepSpeed JSON are known, driven here and of the right kind.

DeepSpeed 0.19 ignores unknown keys at the top silently, and takes "false" for true where it asks no questions.
"""

import difflib
import math
import typing

from pydantic import BaseModel, ValidationError

from llava_ds.engine.ds_config.draft import AUTO, Draft, as_json, value_at
from llava_ds.engine.ds_config.schema import DeepSpeedJson, fields_of, options, section_of, sections

LARGEST = 2**63 - 1

# Gone from DeepSpeed 0.19, and what to use. Older guides and configurations still carry them.
REMOVED = {
    "amp": "write bf16 or fp16, or torch_autocast",
    "compression_training": "remove it: the model would train uncompressed",
    "curriculum_learning": "remove it",
    "eigenvalue": "remove it",
    "elasticity": "write the three batch sizes, or \"auto\"; the samples of a step stay the same on any number of GPUs "
    "with --train_batch_size",
    "graph_harvesting": "remove it; torch.compile takes its place",
    "nebula": "remove it: checkpoints go to --output_dir",
    "progressive_layer_drop": "remove it",
    "quantize_training": "remove it",
    "sparse_attention": "remove it",
    "sparse_gradients": "remove it",
    "zero_optimization.mics_hierarchical_params_gather": "remove it; zero_hpz_partition_size keeps parameters within "
    "a node",
    "zero_optimization.mics_shard_size": "write zero_hpz_partition_size, which shards parameters within a node",
    "zero_optimization.zeropp_loco_param": "remove it: zero_quantized_gradients goes without",
}  # fmt: skip

# Old spellings, and what to write.
RENAMED = {
    "bfloat16": "bf16",
    "aio.thread_count": "intra_op_parallelism",
    "bf16.check_overflow": "check_grad_overflow",
    "zero_optimization.cpu_offload": '"offload_optimizer": {"device": "cpu"}',
    "zero_optimization.cpu_offload_param": '"offload_param": {"device": "cpu"}',
    "zero_optimization.cpu_offload_use_pin_memory": "pin_memory in offload_optimizer and offload_param",
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": "stage3_gather_16bit_weights_on_model_save",
    "allgather_size": "allgather_bucket_size in zero_optimization",
}


# What this trainer doesn't do, by the key that asks for it, and the values that don't ask.
NOT_HERE = {
    "checkpoint.load_universal": ((False,), "checkpoints are taken up by --resume"),
    "checkpoint.use_node_local_storage": ((False,), "checkpoints are written to --output_dir, which nodes share"),
    "checkpoint.writer": ((), "checkpoints are written and hashed before training goes on"),
    "checkpoint.parallel_write.pipeline_stage": ((False,), "there are no pipeline stages"),
    "gradient_allreduce_op": (("mean",), "the loss is divided by the tokens of all ranks, which takes their mean"),
    "managed_gradient_accumulation": ((True,), "the loop steps the engine after every micro-batch"),
    "sequence_parallel_size": ((1,), "sequence parallelism is not here yet"),
    "use_data_before_expert_parallelism": ((False,), "mixtures of experts don't train here yet"),
    # Other trainers' names, which DeepSpeed would ignore.
    "tp_size": ((1,), "tensor parallelism is not here yet"),
    "tensor_model_parallel_size": ((1,), "tensor parallelism is not here yet"),
    "pipeline_model_parallel_size": ((1,), "pipeline parallelism is not here yet"),
    "pipeline_parallel_size": ((1,), "pipeline parallelism is not here yet"),
    "expert_model_parallel_size": ((1,), "mixtures of experts don't train here yet"),
    "moe_expert_parallel_size": ((1,), "mixtures of experts don't train here yet"),
    "expert_parallel_size": ((1,), "mixtures of experts don't train here yet"),
    "context_parallel_size": ((1,), "sequence parallelism is not here yet"),
    "mpu": ((), "it is an object of Megatron's, and model parallelism is not here yet"),
    "zero_optimization.elastic_checkpoint": ((False,), "checkpoints are taken up by --resume"),
    "zero_optimization.legacy_stage1": ((False,), "write stage 1 alone"),
    "zero_optimization.zenflow": ((), "ZenFlow is not here yet; offload_optimizer trains the same model"),
}
# Whole sections of the kind, and why; they are left out where they are empty or say that they are off.
SECTIONS_NOT_HERE = {
    "autotuning": "autotuning starts other runs; run/estimate.py says which stage fits",
    "data_efficiency": "the order of samples comes from --group_by_length and its like",
    "datastates_ckpt": "checkpoints are written and hashed before training goes on",
    "expert_parallel": "mixtures of experts don't train here yet",
    "hybrid_engine": "nothing is generated while training",
    "pipeline": "pipeline parallelism is not here yet",
    "tensor_parallel": "tensor parallelism is not here yet",
    "weight_quantization": "weights train in the precision of bf16, fp16 or fp32",
}
OFF = {"enabled": (False,), "autotp_size": (0, 1), "tp_size": (1,), "stages": (1, "auto")}


def check_keys(draft: Draft) -> None:
    """Refuse keys that are unknown, gone or not driven, and values of another kind, and take them out.

    What is left is of the kind that the schema says, or "auto"; nulls are keys that aren't there. A wrong stage is
    taken for 3, where most goes, so that it is not the cause of other problems.
    """
    draft.config = config = _without(draft.config, None)
    _take_out_what_is_gone(draft)
    _take_out_what_is_not_here(draft)
    _use_full_names(draft)
    _walk(draft, config, DeepSpeedJson, "")
    _check_by_pydantic(draft)
    if "zero_optimization.stage" in draft.wrong:
        config["zero_optimization"]["stage"] = 3
    for section in ("zero_optimization", "bf16", "fp16", "timers"):
        config.setdefault(section, {})


def _take_out_what_is_gone(draft: Draft) -> None:
    for key, instead in (*REMOVED.items(), *RENAMED.items()):
        value = value_at(draft.config, key)
        if value is None:
            continue
        _remove(draft.config, key)
        if value is False or _is_off(value):
            continue
        gone = key in REMOVED
        draft.refuse(
            f"{key} in the DeepSpeed JSON is {'gone from DeepSpeed 0.19' if gone else 'an old spelling'}: "
            f"{'' if gone else 'write '}{instead}"
        )


def _take_out_what_is_not_here(draft: Draft) -> None:
    for key, why in SECTIONS_NOT_HERE.items():
        value = draft.config.pop(key, None)
        if value is None or value == {} or _is_off(value):
            continue
        asks = next((k for k in OFF if isinstance(value, dict) and k in value and value[k] not in OFF[k]), None)
        found = f"{key}.{asks} is {as_json(value[asks])}" if asks else f"{key} is {as_json(value)}"
        draft.refuse(f"{found} in the DeepSpeed JSON: remove it, {why}")
    for key, (harmless, why) in NOT_HERE.items():
        value = value_at(draft.config, key)
        if value is None:
            continue
        asks = not any(value == one and type(value) is type(one) for one in harmless)  # true is no 1
        if asks:
            draft.refuse(f"{key} is {as_json(value)} in the DeepSpeed JSON: remove it, {why}")
        if asks or key not in fields_of(DeepSpeedJson):
            _remove(draft.config, key)


def _is_off(value: object) -> bool:
    said = {key: value[key] for key in OFF if key in value} if isinstance(value, dict) else {}
    return said.get("enabled") is False or (bool(said) and all(each in OFF[key] for key, each in said.items()))


def _use_full_names(draft: Draft) -> None:
    """DeepSpeed knows keys of stage 3 with and without the prefix stage3_: from here on they have it."""
    zero = draft.config.get("zero_optimization")
    if not isinstance(zero, dict):
        return
    for name, info in sections()["zero_optimization"].model_fields.items():
        if info.alias is None or name not in zero:
            continue
        value = zero.pop(name)
        if info.alias in zero:
            draft.refuse(f"zero_optimization has both {name} and {info.alias}, which are one key: remove one of them")
        zero.setdefault(info.alias, value)


def _walk(draft: Draft, section: dict, model: type[BaseModel], prefix: str) -> None:
    """Take out what is unknown or of another kind than the section's description says."""
    fields = fields_of(model)
    for name in list(section):
        value, key = section[name], prefix + name
        if name not in fields:
            del section[name]
            draft.refuse(_unknown(prefix.removesuffix("."), name))
            continue
        below = section_of(fields[name])
        if below is not None and isinstance(value, dict):
            _walk(draft, value, below, f"{key}.")
        elif wanted := _wanted(value, key, fields[name]):
            del section[name]
            draft.wrong.add(key)
            draft.refuse(f"{key} is {as_json(value)} in the DeepSpeed JSON: write {wanted}")


def _wanted(value: object, key: str, annotation: object) -> str | None:
    """What should stand there instead; None where the value is of the right kind."""
    kinds = options(annotation)
    below = section_of(annotation)
    if below is not None or dict in kinds:
        if below is None and isinstance(value, dict):
            return None
        return f"an object with {', '.join(list(fields_of(below))[:3])}, ..." if below else "an object"
    is_stage = key == "zero_optimization.stage"
    if value == AUTO and not is_stage and not key.endswith(".type"):
        return None
    if bool in kinds:
        return None if isinstance(value, bool) else "true or false"
    numbers = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, (int, float))]
    if numbers:
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(_clamped(value))
        whole = is_number and (float not in numbers) <= (value == int(value)) and abs(value) <= LARGEST
        if is_stage:
            return None if whole and isinstance(value, int) and 0 <= value <= 3 else "0, 1, 2 or 3"
        return None if whole else "a whole number" if float not in numbers else "a number"
    if str in kinds:
        return None if isinstance(value, str) else "a text" if not key.endswith(".type") else "a name"
    if any(kind is list or typing.get_origin(kind) is list for kind in kinds):
        return None if isinstance(value, list) else "a list"
    return None


def _clamped(value: float) -> float:
    """The number, or infinity for an integer that no float holds."""
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _check_by_pydantic(draft: Draft) -> None:
    """Ranges, words and what DeepSpeed's own descriptions check; what is refused is taken out."""
    try:
        DeepSpeedJson.model_validate(_without(draft.config, AUTO))
    except ValidationError as error:
        for one in error.errors():
            path = _path(one["loc"])
            key = ".".join(path)
            if key in draft.wrong:
                continue
            draft.wrong.add(key)
            draft.refuse(_message(draft.config, key, one))
            parent, _, name = key.rpartition(".")
            section = value_at(draft.config, parent) if parent else draft.config
            if key not in sections() and isinstance(section, dict):
                section.pop(name, None)


def _path(location: tuple) -> list[str]:
    """Where in the JSON: pydantic also names the branches of unions on the way."""
    path: list[str] = []
    for part in map(str, location):
        model = sections().get(".".join(path))
        if model is None or part in fields_of(model):
            path.append(part)
    branches = ("int", "float", "bool", "str")
    return [part for part in path if "[" not in part and part not in branches]


_KINDS = {
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "string_type": "a text",
    "list_type": "a list",
    "path_type": "a path",
    "dict_type": "an object",
}


def _message(config: dict, key: str, error: dict) -> str:
    """One of pydantic's errors in our words."""
    kind, context = error["type"], error.get("ctx", {})
    if kind == "missing":
        return f"{key} is missing in the DeepSpeed JSON: write it, or remove its section"
    wanted = _KINDS.get(kind)
    if kind in ("enum", "literal_error"):
        wanted = context["expected"].replace("'", '"')
    for limit, words in (("gt", "above"), ("ge", "from"), ("lt", "below"), ("le", "up to")):
        if limit in context:
            wanted = f"a number {words} {context[limit]:g}"
    if wanted is not None:
        return f"{key} is {as_json(_at(config, key))} in the DeepSpeed JSON: write {wanted}"
    return f"{key} in the DeepSpeed JSON: {error['msg'].partition(', ')[2] or error['msg']}"  # DeepSpeed's own check


def _at(config: dict, key: str) -> object:
    """Like value_at, also into lists."""
    value: object = config
    for part in key.split("."):
        value = value[int(part)] if isinstance(value, list) else value[part]
    return value


def _unknown(parent: str, name: str) -> str:
    """What to say of a key that a section does not have."""
    homes = [place for place, model in sections().items() if name in fields_of(model)]
    nested = _nested(parent, name.split(".")) if "." in name else None
    known = list(fields_of(sections()[parent]))
    nearest = difflib.get_close_matches(name, known, n=1)
    if nested is not None:
        hint = f"nest it, as {nested}"
    elif nearest:
        hint = f"did you mean {nearest[0]}?"
    elif len(homes) == 1:
        hint = f"it belongs into {homes[0]}" if homes[0] else "it belongs to the top, into no section"
    else:
        hint = f"{parent} has {', '.join(known)}" if parent else "DeepSpeed would ignore it, remove it"
    shown = name if name.isascii() and name.replace("_", "a").isalnum() else as_json(name)
    return f"{parent + '.' if parent else ''}{shown} in the DeepSpeed JSON is no key of DeepSpeed's: {hint}"


def _nested(parent: str, path: list[str]) -> str | None:
    """A dotted key as objects within each other; None where there is no such key."""
    model = sections()[parent]
    for index, name in enumerate(path):
        annotation = fields_of(model).get(name)
        if annotation is None:
            return None
        model = section_of(annotation)
        if model is None:
            if index < len(path) - 1 and dict not in options(annotation):
                return None
            break
    return "{" + ": {".join(f'"{name}"' for name in path) + ": ..." + "}" * len(path)


def _without(config: dict, unwanted: object) -> dict:
    """A copy without the keys of this value, however deep."""
    return {
        key: _without(value, unwanted) if isinstance(value, dict) else value
        for key, value in config.items()
        if not (value is unwanted or (isinstance(value, str) and value == unwanted))
    }


def _remove(config: dict, key: str) -> None:
    *path, last = key.split(".")
    for part in path:
        config = config[part]
    del config[last]
