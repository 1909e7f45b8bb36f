"""The keys of a DeepSpeed JSON and the kinds of their values.

Sections for which DeepSpeed has pydantic models use these models, so their keys match the installed version. The other
sections are declared here, and a test compares their keys with DeepSpeed's source.
"""

import enum
import functools
import pathlib
import types
import typing
from typing import Annotated, Literal

from deepspeed.comm.config import CommsLoggerConfig
from deepspeed.compile.config import CompileConfig
from deepspeed.monitor.config import CometConfig, CSVConfig, TensorBoardConfig, WandbConfig
from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from deepspeed.utils.config import DeepSpeedThroughputTimerConfig
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, create_model
from pydantic_core import PydanticCustomError

Dtype = Literal["fp32", "fp16", "bf16"]
Whole = Annotated[int, Field(gt=0)]
LARGEST = 2**63 - 1


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
    """Schema of the whole file, after nulls and "auto" values are removed."""

    train_batch_size: object = None  # these four are compared with flags, and their kinds checked, elsewhere
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

    # Features that this trainer does not support: keys.py refuses these sections if they enable something.
    autotuning: dict = {}
    data_efficiency: dict = {}
    datastates_ckpt: dict = {}
    expert_parallel: dict = {}
    hybrid_engine: dict = {}
    moe: dict = {}
    use_data_before_expert_parallelism: bool = False
    weight_quantization: dict = {}


def fields_of(model: type[BaseModel]) -> dict[str, object]:
    """Map the keys of a section, in the JSON's spelling, to their annotations. A field's alias precedes its name."""
    fields = {}
    for name, info in model.model_fields.items():
        for key in (info.alias, name):
            if key is not None:
                fields[key] = info.annotation
    return fields


def options(annotation: object) -> tuple:
    """Return the members of a union, or the annotation itself as the only member, without Annotated's metadata."""
    is_union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    parts = typing.get_args(annotation) if is_union else (annotation,)
    return tuple(typing.get_args(part)[0] if typing.get_origin(part) is Annotated else part for part in parts)


def section_of(annotation: object) -> type[BaseModel] | None:
    """Return the model of a section; None for other kinds of values."""
    return next((o for o in options(annotation) if isinstance(o, type) and issubclass(o, BaseModel)), None)


def sections(model: type[BaseModel] = DeepSpeedJson, prefix: str = "") -> dict[str, type[BaseModel]]:
    """Return the models of all sections by dotted key; the whole JSON has the key ""."""
    found = {prefix.removesuffix("."): model}
    for name, info in model.model_fields.items():
        if (below := section_of(info.annotation)) is not None:
            found |= sections(below, f"{prefix}{name}.")
    return found


def default_of(key: str) -> object:
    """Return DeepSpeed's default for a dotted key, or None."""
    *path, name = key.split(".")
    model = sections().get(".".join(path))
    if model is None:
        return None
    found = (info for field, info in model.model_fields.items() if name in (field, info.alias))
    default = next((info.get_default() for info in found), None)
    default = getattr(default, "value", default)
    return default if isinstance(default, (bool, int, float, str)) else None


@functools.cache
def strict_model(model: type[BaseModel]) -> type[BaseModel]:
    """Make a copy of a section's model that converts no values: it refuses "false" as a boolean, and true as a number.

    DeepSpeed's models convert values, but DeepSpeed reads some of them unconverted. pydantic's strict mode has no
    effect in these models, because they define __init__. The copy has no validators.
    """
    fields = {name: (_strict(info.annotation), info) for name, info in model.model_fields.items()}
    config = ConfigDict(extra="forbid", strict=True, populate_by_name=True, protected_namespaces=())
    return create_model(model.__name__, __config__=config, **fields)


def _strict(annotation: object) -> object:
    """Return an annotation that accepts the same values as a field's, but without conversion."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        return Annotated[(_strict(arguments[0]), *arguments[1:])]
    if origin in (typing.Union, types.UnionType):
        return typing.Union[tuple(map(_strict, arguments))]  # noqa: UP007 (number of members known only at run time)
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return strict_model(annotation)
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        values = Literal[tuple(member.value for member in annotation)]
        return Annotated[values, BeforeValidator(lambda v: v if type(v) is int else str(v))]  # refuses True and 1.0
    kinds = {int: Annotated[int, BeforeValidator(_whole)], float: Annotated[float, BeforeValidator(_number)]}
    return {**kinds, pathlib.Path: str}.get(annotation, annotation)


def _whole(value: object) -> int:
    """Convert to an integer; accepts notations like 5e8."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) <= LARGEST or value % 1:
        raise PydanticCustomError("int_type", "no whole number")
    return int(value)


def _number(value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) <= LARGEST:  # also refuses nan
        raise PydanticCustomError("float_type", "no number")
    return float(value)
