"""Which keys a DeepSpeed JSON may hold, of what kind: DeepSpeed 0.19 ignores unknown ones at the top silently.

Sections that DeepSpeed describes with pydantic are taken from it, so that this page is true for the version installed;
the others are written out here. tests/ds_config/test_schema.py compares the names with those in DeepSpeed's source.
"""

import difflib
import types
import typing
from typing import Annotated, Literal

from deepspeed.comm.config import CommsLoggerConfig
from deepspeed.compile.config import CompileConfig
from deepspeed.monitor.config import CometConfig, CSVConfig, TensorBoardConfig, WandbConfig
from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from deepspeed.utils.config import DeepSpeedThroughputTimerConfig
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from llava_ds.ds_config.draft import AUTO, Draft, as_json, open_keys, value_at

Dtype = Literal["fp32", "fp16", "bf16"]
Whole = Annotated[int, Field(gt=0)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", protected_namespaces=())


class ActivationCheckpointing(_Section):
    partition_activations: bool = False
    contiguous_memory_optimization: bool = False
    cpu_checkpointing: bool = False
    number_checkpoints: Whole | None = None
    synchronize_checkpoint_boundary: bool = False
    profile: bool = False


class Aio(_Section):
    block_size: Whole = 1048576
    queue_depth: Whole = 8
    intra_op_parallelism: Whole = 1
    single_submit: bool = False
    overlap_events: bool = True
    use_gds: bool = False


class FlopsProfiler(_Section):
    enabled: bool = False
    recompute_fwd_factor: Annotated[float, Field(ge=0)] = 0.0
    profile_step: Whole = 1
    module_depth: int = -1
    top_modules: Whole = 1
    detailed: bool = True
    output_file: str | None = None


class TorchAutocast(_Section):
    enabled: bool = False
    dtype: Literal["fp16", "float16", "half", "torch.float16", "bf16", "bfloat16", "torch.bfloat16"] | None = None
    lower_precision_safe_modules: list[str] | None = None


class DataTypes(_Section):
    grad_accum_dtype: Dtype | None = None
    param_dtype: Dtype | None = None
    buffer_dtype: Dtype | None = None
    keep_in_fp32_modules: list[str] | None = None


class ParallelWrite(_Section):
    pipeline_stage: bool = False


class Checkpoint(_Section):
    tag_validation: Literal["Ignore", "Warn", "Fail", "IGNORE", "WARN", "FAIL", "ignore", "warn", "fail"] = "Warn"
    load_universal: bool = False
    use_node_local_storage: bool = False
    parallel_write: ParallelWrite | None = None
    checkpoint_serialization: bool = True
    writer: dict | None = None


class Optimizer(_Section):
    type: str
    params: dict = {}
    legacy_fusion: bool = False


class Scheduler(_Section):
    type: str
    params: dict = {}


class Timers(_Section):
    throughput: DeepSpeedThroughputTimerConfig | None = None


class DeepSpeedJson(_Section):
    """The whole file, nulls and "auto" left out."""

    train_batch_size: object = None  # these four are compared with flags, and their kind with them
    train_micro_batch_size_per_gpu: object = None
    gradient_accumulation_steps: object = None
    gradient_clipping: object = None
    managed_gradient_accumulation: bool = True
    prescale_gradients: bool = False
    gradient_predivide_factor: Annotated[float, Field(gt=0)] = 1.0
    gradient_allreduce_op: Literal["mean", "sum"] = "mean"
    communication_data_type: Dtype | None = None
    seq_parallel_communication_data_type: Dtype | None = None
    disable_allgather: bool = False

    optimizer: Optimizer | None = None
    scheduler: Scheduler | None = None
    zero_allow_untested_optimizer: bool = False
    zero_force_ds_cpu_optimizer: bool = True

    fp16: DeepSpeedFP16Config | None = None
    bf16: DeepSpeedBF16Config | None = None
    torch_autocast: TorchAutocast | None = None
    data_types: DataTypes | None = None

    zero_optimization: DeepSpeedZeroConfig | None = None
    aio: Aio | None = None
    activation_checkpointing: ActivationCheckpointing | None = None
    compile: CompileConfig | None = None
    checkpoint: Checkpoint | None = None

    steps_per_print: Whole | None = None
    wall_clock_breakdown: bool = False
    memory_breakdown: bool = False
    dump_state: bool = False
    disable_python_gc: bool = False
    log_level: Literal["debug", "info", "warning", "error", "critical"] | None = None
    timers: Timers | None = None
    flops_profiler: FlopsProfiler | None = None
    comms_logger: CommsLoggerConfig | None = None
    tensorboard: TensorBoardConfig | None = None
    wandb: WandbConfig | None = None
    csv_monitor: CSVConfig | None = None
    comet: CometConfig | None = None
    dataloader_drop_last: bool = False
    vocabulary_size: Whole | None = None

    # Other ways of training: NOT_HERE says so when one is switched on.
    autotuning: dict = {}
    data_efficiency: dict = {}
    datastates_ckpt: dict = {}
    expert_parallel: dict = {}
    hybrid_engine: dict = {}
    pipeline: dict = {}
    sequence_parallel_size: Whole = 1
    tensor_parallel: dict = {}
    use_data_before_expert_parallelism: bool = False
    weight_quantization: dict = {}


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
    "autotuning.enabled": ((False,), "autotuning starts other runs; run/estimate.py says which stage fits"),
    "checkpoint.load_universal": ((False,), "checkpoints are taken up by --resume"),
    "checkpoint.use_node_local_storage": ((False,), "checkpoints are written to --output_dir, which nodes share"),
    "checkpoint.writer": ((), "checkpoints are written and hashed before training goes on"),
    "checkpoint.parallel_write.pipeline_stage": ((False,), "there are no pipeline stages"),
    "data_efficiency.enabled": ((False,), "the order of samples comes from --group_by_length and its like"),
    "datastates_ckpt": (({},), "checkpoints are written and hashed before training goes on"),
    "expert_parallel": (({},), "mixtures of experts don't train here yet"),
    "gradient_allreduce_op": (("mean",), "the loss is divided by the tokens of all ranks, which takes their mean"),
    "hybrid_engine.enabled": ((False,), "nothing is generated while training"),
    "managed_gradient_accumulation": ((True,), "the loop steps the engine after every micro-batch"),
    "pipeline": (({},), "pipeline parallelism is not here yet"),
    "sequence_parallel_size": ((1,), "sequence parallelism is not here yet"),
    "tensor_parallel.autotp_size": ((0, 1), "tensor parallelism is not here yet"),
    "use_data_before_expert_parallelism": ((False,), "mixtures of experts don't train here yet"),
    "weight_quantization": (({},), "weights train in the precision of bf16, fp16 or fp32"),
    "zero_optimization.elastic_checkpoint": ((False,), "checkpoints are taken up by --resume"),
    "zero_optimization.legacy_stage1": ((False,), "write stage 1 alone"),
    "zero_optimization.zenflow": ((), "ZenFlow is not here yet; offload_optimizer trains the same model"),
}


def check_keys(draft: Draft) -> None:
    """Refuse keys that are unknown, gone or not driven, and values of another kind; leave sections that are objects.

    Nulls are taken out: a null is a key that isn't there.
    """
    draft.config = config = _without(draft.config, None)
    for key, instead in (*REMOVED.items(), *RENAMED.items()):
        if value_at(config, key) is not None:
            draft.refuse(
                f"{key} in the DeepSpeed JSON is gone from DeepSpeed 0.19: {instead}"
                if key in REMOVED
                else f"{key} in the DeepSpeed JSON is an old spelling: write {instead}"
            )
            _remove(config, key)
    for key, (harmless, why) in NOT_HERE.items():
        value = value_at(config, key)
        if value is not None and value not in harmless:
            draft.refuse(f"{key} is {as_json(value)} in the DeepSpeed JSON: remove it, {why}")
            _remove(config, key)
    for key, model in _sections():
        value = value_at(config, key)
        if value is not None and not isinstance(value, dict):
            names = f" with {', '.join(names_of(model)[:3])}, ..." if model else ""
            draft.refuse(f"{key} is {as_json(value)} in the DeepSpeed JSON: write an object{names}")
            _remove(config, key)
    for key, problem in _problems(config):
        draft.refuse(problem)
        draft.wrong.add(key)
    for section in ("zero_optimization", "bf16", "fp16", "timers"):
        config.setdefault(section, {})


def _problems(config: dict) -> list[tuple[str, str]]:
    """Key and message of every value that the schema refuses."""
    found = {key: _kind_message(config, key, "a whole number") for key in _booleans_for_numbers(config)}
    sections = {"": DeepSpeedJson, **{key: model for key, model in _sections() if model is not None}}
    for key in open_keys(config):  # pydantic does not see these
        parent, _, name = key.rpartition(".")
        if parent in sections and name not in names_of(sections[parent]):
            found[key] = _unknown(key)
    try:
        DeepSpeedJson.model_validate(_without(config, AUTO))
    except ValidationError as error:
        for one in error.errors():
            key = ".".join(part for part in map(str, one["loc"]) if "[" not in part and part not in _TYPE_NAMES)
            found.setdefault(key, _message(config, key, one))
    return list(found.items())


_TYPE_NAMES = ("int", "float", "bool", "str")
_KINDS = {
    "bool_parsing": "true or false",
    "bool_type": "true or false",
    "int_parsing": "a whole number",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "finite_number": "a finite number",
    "float_parsing": "a number",
    "float_type": "a number",
    "list_type": "a list",
    "string_type": "a text",
    "path_type": "a path",
    "dict_type": "an object",
}


def _message(config: dict, key: str, error: dict) -> str:
    """One of pydantic's errors in our words."""
    kind, context = error["type"], error.get("ctx", {})
    if kind == "extra_forbidden":
        return _unknown(key)
    if kind == "missing":
        return f"{key} is missing in the DeepSpeed JSON: write it, or remove its section"
    if key == "zero_optimization.stage":
        return _kind_message(config, key, "0, 1, 2 or 3")  # DeepSpeed's list of stages names the last twice
    if kind in ("enum", "literal_error"):
        return _kind_message(config, key, context["expected"].replace("'", '"'))
    for limit, words in (("gt", "above"), ("ge", "from"), ("lt", "below"), ("le", "up to")):
        if limit in context:
            return _kind_message(config, key, f"a number {words} {context[limit]:g}")
    if kind in _KINDS:
        return _kind_message(config, key, _KINDS[kind])
    return f"{key} in the DeepSpeed JSON: {error['msg'].partition(', ')[2] or error['msg']}"  # DeepSpeed's own check


def _kind_message(config: dict, key: str, expected: str) -> str:
    return f"{key} is {as_json(_at(config, key))} in the DeepSpeed JSON: write {expected}"


def _at(config: dict, key: str) -> object:
    """Like value_at, also into lists."""
    value: object = config
    for part in key.split("."):
        value = value[int(part)] if isinstance(value, list) else value[part]
    return value


def _unknown(key: str) -> str:
    parent, _, name = key.rpartition(".")
    known = names_of(_model_at(parent))
    nearest = difflib.get_close_matches(name, known, n=1)
    if nearest:
        hint = f"did you mean {nearest[0]}?"
    elif len(homes := [place for place, model in [("", DeepSpeedJson), *_sections()] if name in names_of(model)]) == 1:
        hint = f"it belongs into {homes[0]}" if homes[0] else "it belongs to the top, into no section"
    else:
        hint = f"{parent} has {', '.join(known)}" if parent else "DeepSpeed would ignore it, remove it"
    return f"{key} in the DeepSpeed JSON is no key of DeepSpeed's: {hint}"


def names_of(model: type[BaseModel] | None) -> list[str]:
    """The keys of a section, as they are written in a JSON."""
    return [
        name for field, info in (model.model_fields.items() if model else ()) for name in (info.alias, field) if name
    ]


def _sections(model: type[BaseModel] = DeepSpeedJson, prefix: str = "") -> list[tuple[str, type[BaseModel] | None]]:
    """The dotted keys that hold objects, and what they hold where that is described."""
    found = []
    for name, info in model.model_fields.items():
        for option in _options(info.annotation):
            if option is dict:
                found.append((prefix + name, None))
            elif isinstance(option, type) and issubclass(option, BaseModel):
                found += [(prefix + name, option), *_sections(option, f"{prefix}{name}.")]
    return found


def _model_at(key: str) -> type[BaseModel]:
    """The description of the section at a dotted key."""
    return dict(_sections())[key] if key else DeepSpeedJson


def _options(annotation: object) -> tuple:
    """A | B | None as its parts."""
    is_union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    return typing.get_args(annotation) if is_union else (annotation,)


def _booleans_for_numbers(config: dict, model: type[BaseModel] = DeepSpeedJson, prefix: str = "") -> list[str]:
    """Keys of numbers that hold true or false, which pydantic would take for 1 and 0."""
    found = []
    for name, info in model.model_fields.items():
        options = _options(info.annotation)
        for spelling in {name, info.alias or name} & set(config):
            value = config[spelling]
            section = next((o for o in options if isinstance(o, type) and issubclass(o, BaseModel)), None)
            if section is not None and isinstance(value, dict):
                found += _booleans_for_numbers(value, section, f"{prefix}{spelling}.")
            elif isinstance(value, bool) and bool not in options and section is None and _is_number(options):
                found.append(prefix + spelling)
    return found


def _is_number(options: tuple) -> bool:
    kinds = [typing.get_args(o)[0] if typing.get_origin(o) is Annotated else o for o in options]
    return any(isinstance(kind, type) and issubclass(kind, (int, float)) for kind in kinds)


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
