"""The axes of the mesh in flags and DeepSpeed JSON, and what can't be trained on them."""

from transformers import PreTrainedConfig

from llava_ds.config.arguments import Arguments, flag_default
from llava_ds.config.bounds import MOST
from llava_ds.config.properties import clashes, features
from llava_ds.constants import ConfigError
from llava_ds.engine import tensor_parallel
from llava_ds.engine.ds_config.compilation import deep_compiles
from llava_ds.engine.ds_config.draft import AUTO, Draft, as_json, value_at
from llava_ds.engine.ds_config.optimizer import BITSANDBYTES, optimizer_name
from llava_ds.engine.ds_config.zero import OFFLOADED, offload_device
from llava_ds.extensions.active import active, flags_class, reading
from llava_ds.model import stages
from llava_ds.model.families.language import is_mixture, is_upcycled

TENSOR, PIPELINE = "tensor_parallel_size", "pipeline_parallel_size"  # flags
EXPERT, EXPERT_KEY = "ep_size", "moe_expert_parallel_size"  # flag and key, which DeepSpeed is not told either
SECTION, STAGES = "tensor_parallel", "pipeline"  # DeepSpeed's, of the JSON
# Its other keys, with the values that ask for nothing, and what to do about the others.
_OTHERS = {
    "enabled": ((True,), "leave it out, the size says whether"),
    "tp_grain_size": ((1,), "matrices are cut into equal parts, by heads"),
    "mpu": ((), "it is an object of Megatron's: the size alone lays the ranks out"),
    "tp_group": ((), "the size alone lays the ranks out"),
    "tp_overlap_comm": ((False,), "DeepSpeed 0.19.8 gets the gradients of biases wrong with it"),
    "vocab_parallel_lm_head": ((False,), "the output layer is whole on every rank"),
    "vocab_parallel_ce_backend": (("torch",), "the output layer is whole on every rank"),
    "partition_config": ((), "which matrices are cut follows from the model"),
    "preset_model": ((), "which matrices are cut follows from the model"),
    "injection_policy_tuple": ((), "which matrices are cut follows from the model"),
    "keep_module_on_host": ((False,), "it is made for inference"),
    "replace_with_kernel_inject": ((False,), "it is made for inference"),
    "kernel_inject": ((False,), "it is made for inference"),
    "dtype": ((), "weights train in the precision of bf16, fp16 or fp32"),
}
_PIPELINES_OTHERS = {
    "partition": (("best", "auto"), "stages are cut so that their FLOPs are even"),
    "seed_layers": ((False,), "every part has a seed of its own"),
    "activation_checkpoint_interval": ((0,), "--gradient_checkpointing says which layers are recomputed"),
    "pipe_partitioned": ((True, False), ""),  # nothing reads them without Megatron's layers
    "grad_partitioned": ((True, False), ""),
    "use_reentrant": ((True, False), ""),
}
# Updates of a matrix that need all of it.
_WHOLE_MATRICES = {"Lamb": "a layer's norm", "Adafactor": "a matrix's rows and columns", "Muon": "whole matrices"}
_OWN_GROUPS = (
    "zero_hpz_partition_size",
    "zero_quantized_weights",
    "zero_quantized_nontrainable_weights",
    "zero_quantized_gradients",
)


def with_axes(args: Arguments, raw: dict | None) -> Arguments:
    """The flags with the JSON's sizes. Raises ConfigError, with every reason, where both are given and differ, or mean
    nothing.

    Ranks are laid out before the JSON is resolved.
    """
    raw, problems = raw or {}, []
    own = [flags_class(name).in_json(raw, problems) for name in reading(raw)]
    written = {
        **{flag: found for each in own for flag, found in each.items()},
        TENSOR: _of_section(raw.get(SECTION), problems),
        PIPELINE: (_stages_of(raw.get(STAGES), problems), f"{STAGES}.stages"),
        EXPERT: (raw.get(EXPERT_KEY), EXPERT_KEY),
    }
    for flag, (size, key) in written.items():
        if size in (None, AUTO):
            continue
        if not isinstance(size, int) or isinstance(size, bool) or not 1 <= size <= MOST:
            problems.append(f'{key} is {as_json(size)} in the DeepSpeed JSON: write a whole number above 0, or "auto"')
        elif flag in args.given and (given := args.as_dict().get(flag, flag_default(flag))) != size:
            problems.append(
                f'{key} is {size} in the DeepSpeed JSON but --{flag} is {given}: make them equal, or write "auto"'
            )
        else:
            known, args = clashes(features(args)), args.replaced(**{flag: size})
            problems += [line for line in clashes(features(args)) if line not in known]
    if problems:
        raise ConfigError("\n".join(problems))
    return args


def _of_section(found: object, problems: list[str]) -> tuple[object, str]:
    """The size that DeepSpeed's section gives, and its key. Adds a line for each key that means something else."""
    if found is None or found == {}:
        return None, SECTION
    if not isinstance(found, dict):
        problems.append(f'{SECTION} is {as_json(found)} in the DeepSpeed JSON: write {{"autotp_size": {_size(found)}}}')
        return None, SECTION
    inner = found.get("tp") or {}
    if not isinstance(inner, dict):
        problems.append(f'{SECTION}.tp is {as_json(inner)} in the DeepSpeed JSON: write {{"tp_size": {_size(inner)}}}')
        inner = {}
    if found.get("enabled") is False:
        return None, SECTION
    flat = {**{f"tp.{key}": value for key, value in inner.items()}, **found}
    flat.pop("tp", None)
    sizes: dict[str, object] = {}
    asked = next((flat[key] for key in ("autotp_size", "tp_size", "tp.tp_size") if key in flat), None)
    for key, value in flat.items():
        name = key.removeprefix("tp.")
        if value is None:
            continue
        if name in ("autotp_size", "tp_size"):
            sizes[f"{SECTION}.{key}"] = 1 if value == 0 and value is not False else value  # 0 is DeepSpeed's for off
            continue
        harmless, why = _OTHERS.get(name, ((), f'write {{"autotp_size": {_size(asked)}}} alone'))
        if not any(value == one and type(value) is type(one) for one in harmless):
            problems.append(f"{SECTION}.{key} is {as_json(value)} in the DeepSpeed JSON: remove it, {why}")
    if "tp.tp_size" in flat and flat["tp.tp_size"] == 1 and len(sizes) > 1:
        del sizes[f"{SECTION}.tp.tp_size"]  # DeepSpeed's default
    if len(set(map(as_json, sizes.values()))) > 1:
        said = " and ".join(f"{key} is {as_json(value)}" for key, value in sizes.items())
        problems.append(f"{said} in the DeepSpeed JSON: write one of them")
        return None, SECTION
    return next(((size, key) for key, size in sizes.items()), (None, SECTION))


def _stages_of(found: object, problems: list[str]) -> object:
    """What DeepSpeed's section of a pipeline gives. Adds a line for each key that means something else."""
    if not isinstance(found, dict):
        if found is not None:
            problems.append(f'{STAGES} is {as_json(found)} in the DeepSpeed JSON: write {{"stages": {_size(found)}}}')
        return None
    for key, value in found.items():
        harmless, why = _PIPELINES_OTHERS.get(key, ((), f'write {{"stages": {_size(found.get("stages"))}}} alone'))
        if key != "stages" and not any(value == one and type(value) is type(one) for one in harmless):
            problems.append(f"{STAGES}.{key} is {as_json(value)} in the DeepSpeed JSON: remove it, {why}")
    return found.get("stages")


def _size(value: object) -> object:
    """A size as a message repeats it: what was written, if it can be one."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else "N"


def take_axes(draft: Draft, own: dict) -> None:
    """Let the flags take the JSON's sizes, and leave in the JSON what DeepSpeed is to know (for_engine). own: values of
    the keys that extensions have."""
    try:
        draft.args = with_axes(draft.args, draft.config | own)
    except ConfigError as error:
        for line in str(error).splitlines():
            draft.refuse(line)
    for key in (SECTION, STAGES, EXPERT_KEY):
        draft.config.pop(key, None)
    tp, pp = draft.args.training.tensor_parallel_size, draft.args.training.pipeline_parallel_size
    ep = draft.args.training.ep_size
    if draft.args.model.moe_enable or ep > 1:
        _check_experts(draft, "--moe_enable is True" if ep == 1 else f"--{EXPERT} is {ep}")
    if tp > 1:
        draft.fill(f"{SECTION}.autotp_size", tp, f"--{TENSOR}, or the JSON")
        _check_config(draft, tp)
    if pp > 1:
        _check_stages(draft, pp)


def _check_config(draft: Draft, tp: int) -> None:
    """Refuse what does not go with matrices that are cut."""
    flag, config = f"--{TENSOR} is {tp}", draft.config
    block = config.get("optimizer")
    name = block.get("type") if isinstance(block, dict) else None
    for optimizer, needs in _WHOLE_MATRICES.items():
        if isinstance(name, str) and name.lower() == optimizer.lower():
            draft.refuse(f"{flag}, but {optimizer}'s updates depend on {needs}, which no rank has: take another")
    for key in _OWN_GROUPS:
        value = value_at(config, f"zero_optimization.{key}")
        if value not in (None, False) and (value is True or value not in (1, -1)):
            draft.refuse(f"{flag}, but zero_optimization.{key} makes groups of ranks of its own: remove one of them")
    for part in OFFLOADED:
        if offload_device(config, part) == "nvme":
            draft.refuse(f'{flag}, but zero_optimization.{part}.device is "nvme", which is not tried: write "cpu"')
    if deep_compiles(config):
        draft.refuse(f"{flag}, but compile.deepcompile cuts matrices by rules of its own: remove one of them")


def _check_stages(draft: Draft, pp: int) -> None:
    """Refuse what does not go with stages of a pipeline."""
    flag, config = f"--{PIPELINE} is {pp}", draft.config
    stage = value_at(config, "zero_optimization.stage")
    if stage in (2, 3):
        what = "send the gradients of every micro-batch" if stage == 2 else "gather a stage's weights for every one"
        draft.refuse(
            f"{flag}, but zero_optimization.stage is {stage}, at which ranks would {what}: write 1, a stage has "
            "no more than its own part of the model"
        )
    for part in OFFLOADED:
        if (device := offload_device(config, part)) != "none":
            draft.refuse(f'{flag}, but zero_optimization.{part}.device is "{device}", which is not tried: remove it')
    for key in ("fp16", "torch_autocast"):
        if value_at(config, f"{key}.enabled") is True:
            draft.refuse(f"{flag}, but {key} is on, whose loss scale stages would have to agree on: use bf16 or fp32")
    if deep_compiles(config):
        draft.refuse(f"{flag}, but compile.deepcompile traces a whole model: remove one of them")


def _check_experts(draft: Draft, flag: str) -> None:
    """Refuse ZeRO-3, and over ranks that share experts what has another norm of the gradients than one rank."""
    config = draft.config
    if value_at(config, "zero_optimization.stage") == 3:
        draft.refuse(f"{flag}, but DeepSpeed's layer of experts works at ZeRO 0 to 2: give ds_configs/zero2.json")
    if draft.args.training.ep_size == 1:
        return
    if "optimizer" in config:
        why = "with any other DeepSpeed averages norms of experts over the ranks that share them"
        draft.refuse(f"{flag}, which needs torch's AdamW, by flags ({why}): leave optimizer out of the JSON")
    if (optim := draft.args.training.optim) != "adamw_torch":
        draft.refuse(f"{flag}, which needs torch's AdamW: leave out --optim {optim}")
    for part in OFFLOADED:
        if offload_device(config, part) != "none":
            draft.refuse(f"{flag}, but zero_optimization.{part} steps outside the check of all ranks' norm: remove it")
    if value_at(config, "zero_optimization.compute_grad_norm") is False:
        draft.refuse(f"{flag}, which needs the norm of gradients: remove zero_optimization.compute_grad_norm")
    for section in ("fp16", "torch_autocast"):
        if value_at(config, f"{section}.enabled") is True:
            draft.refuse(f"{flag}, but with {section} each rank would look for its own loss scale: write bf16")


def check_axes(args: Arguments, text_config: PreTrainedConfig) -> None:
    """Raise ConfigError, with every reason, for a language model that can't be trained on these axes."""
    lines = [
        f"--{flag} is {size}: {problem}"
        for flag, size, found in (
            (TENSOR, args.training.tensor_parallel_size, _tensor_problems),
            (PIPELINE, args.training.pipeline_parallel_size, _pipeline_problems),
        )
        if size > 1
        for problem in found(text_config, size)
    ]
    lines += active(args.own).check_model(args, text_config)
    if lines:
        raise ConfigError("\n".join(lines))


def _tensor_problems(text_config: PreTrainedConfig, tp: int) -> list[str]:
    return [f"the language model's {each}" for each in tensor_parallel.problems(text_config, tp)]


def _pipeline_problems(text_config: PreTrainedConfig, pp: int) -> list[str]:
    found = []
    if text_config.num_hidden_layers < pp:
        found.append(f"the language model has {text_config.num_hidden_layers} layers: give as many or fewer")
    if problem := stages.problem(text_config):
        found.append(f"the language model's {problem}: take another axis")
    if is_mixture(text_config) or is_upcycled(text_config):
        found.append("routers' loss is not carried between stages, nor are experts: take another axis")
    return found


def for_engine(config: dict) -> dict:
    """A resolved JSON for DeepSpeed: with rules by which it cuts matrices, and without train_batch_size where that
    follows from the two other numbers.

    DeepSpeed checks it against all ranks, some of which may share samples.
    """
    follows = "train_micro_batch_size_per_gpu" in config
    own = {key: value for key, value in config.items() if key != "train_batch_size" or not follows}
    if "optimizer" in own and optimizer_name(own["optimizer"]) in BITSANDBYTES:
        del own["optimizer"]  # start_engine builds it
    if SECTION in own:
        own[SECTION] = tensor_parallel.section(own[SECTION]["autotp_size"])
    return own
