"""The axes of the mesh in flags and DeepSpeed JSON, and what can't be trained on them."""

from transformers import PreTrainedConfig

from llava_ds.config.arguments import Arguments, flag_default
from llava_ds.config.bounds import MOST
from llava_ds.config.properties import clashes, features
from llava_ds.constants import ConfigError
from llava_ds.engine.ds_config.compilation import deep_compiles
from llava_ds.engine.ds_config.draft import AUTO, Draft, as_json, size_shown, value_at
from llava_ds.engine.ds_config.optimizer import BITSANDBYTES, optimizer_name
from llava_ds.engine.ds_config.zero import OFFLOADED, offload_device
from llava_ds.extensions.active import active, flags_class, reading
from llava_ds.model import stages
from llava_ds.model.families.language import is_mixture, is_upcycled

PIPELINE = "pipeline_parallel_size"  # a flag
EXPERT, EXPERT_KEY = "ep_size", "moe_expert_parallel_size"  # flag and key, which DeepSpeed is not told either
STAGES = "pipeline"  # DeepSpeed's section of the JSON
_PIPELINES_OTHERS = {
    "partition": (("best", "auto"), "stages are cut so that their FLOPs are even"),
    "seed_layers": ((False,), "every part has a seed of its own"),
    "activation_checkpoint_interval": ((0,), "--gradient_checkpointing says which layers are recomputed"),
    "pipe_partitioned": ((True, False), ""),  # nothing reads them without Megatron's layers
    "grad_partitioned": ((True, False), ""),
    "use_reentrant": ((True, False), ""),
}


def with_axes(args: Arguments, raw: dict | None) -> Arguments:
    """The flags with the JSON's sizes. Raises ConfigError, with every reason, where both are given and differ, or mean
    nothing.

    Ranks are laid out before the JSON is resolved.
    """
    raw, problems = raw or {}, []
    own = [flags_class(name).in_json(raw, problems) for name in reading(raw)]
    written = {
        **{flag: found for each in own for flag, found in each.items()},
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


def _stages_of(found: object, problems: list[str]) -> object:
    """What DeepSpeed's section of a pipeline gives. Adds a line for each key that means something else."""
    if not isinstance(found, dict):
        if found is not None:
            problems.append(
                f'{STAGES} is {as_json(found)} in the DeepSpeed JSON: write {{"stages": {size_shown(found)}}}'
            )
        return None
    for key, value in found.items():
        harmless, why = _PIPELINES_OTHERS.get(key, ((), f'write {{"stages": {size_shown(found.get("stages"))}}} alone'))
        if key != "stages" and not any(value == one and type(value) is type(one) for one in harmless):
            problems.append(f"{STAGES}.{key} is {as_json(value)} in the DeepSpeed JSON: remove it, {why}")
    return found.get("stages")


def take_axes(draft: Draft, own: dict) -> None:
    """Let the flags take the JSON's sizes, and leave in the JSON what DeepSpeed is to know (for_engine). own: values of
    the keys that extensions have."""
    try:
        draft.args = with_axes(draft.args, draft.config | own)
    except ConfigError as error:
        for line in str(error).splitlines():
            draft.refuse(line)
    for key in (STAGES, EXPERT_KEY):
        draft.config.pop(key, None)
    pp, ep = draft.args.training.pipeline_parallel_size, draft.args.training.ep_size
    if draft.args.model.moe_enable or ep > 1:
        _check_experts(draft, "--moe_enable is True" if ep == 1 else f"--{EXPERT} is {ep}")
    if pp > 1:
        _check_stages(draft, pp)


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
        for flag, size, found in ((PIPELINE, args.training.pipeline_parallel_size, _pipeline_problems),)
        if size > 1
        for problem in found(text_config, size)
    ]
    lines += active(args.own).check_model(args, text_config)
    if lines:
        raise ConfigError("\n".join(lines))


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
    """A resolved JSON for DeepSpeed: without train_batch_size where that follows from the two other numbers.

    DeepSpeed checks it against all ranks, some of which may share samples.
    """
    follows = "train_micro_batch_size_per_gpu" in config
    own = {key: value for key, value in config.items() if key != "train_batch_size" or not follows}
    if "optimizer" in own and optimizer_name(own["optimizer"]) in BITSANDBYTES:
        del own["optimizer"]  # start_engine builds it
    return own
