# I, O widths of a linear layer, R rank, E experts
"""LoRA on linear layers, through peft's layers (Hu et al. 2021, arXiv 2106.09685), and its variants.

Layers are replaced in place; the model's parts keep transformers' classes. The weight of a linear layer "x" becomes
"x.base_layer.weight", with "x.lora_A.default.weight" (R, I) and "x.lora_B.default.weight" (O, R), and with DoRA
"x.lora_magnitude_vector.default.weight" (O,). Experts get it on the tensor that stacks all expert matrices of a layer
(expert_layers.py). Flags and files use the layer names of the class that peft wraps. That is LLaVA's class, with the
language model's names, model.mm_projector and model.vision_tower, or the class of an extension's architecture.
"""

import contextlib
import importlib
import json
import math
import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedConfig

from llava_ds.config.arguments import ModelArguments
from llava_ds.constants import ConfigError, DataError
from llava_ds.engine.shards import safe_load
from llava_ds.extensions.architecture import Architecture
from llava_ds.extensions.lora.expert_layers import wrap_experts
from llava_ds.extensions.lora.flags import LORA_PARTS, Flags, changes_base, is_pattern
from llava_ds.extensions.lora.merged_adapters import PEFT_PREFIX, STACKED, merged_weight
from llava_ds.files.model_files import ADAPTER_CONFIG, ADAPTER_FILES, adapter_file, read_json
from llava_ds.model.open import names as formats

START_FILE = "lora_start.pt"  # in a checkpoint: LoRA's initial matrices, if subtracted from the weights
ADAPTER = "default"  # peft's name for a single adapter
A, B, MAGNITUDE = (f".lora_{part}.{ADAPTER}.weight" for part in ("A", "B", "magnitude_vector"))

# Adapter settings that are not supported because they change the computation, with the values that change nothing.
PLAIN = {
    "use_qalora": (False, None), "lora_bias": (False, None), "trainable_token_indices": (None, []),
    "fan_in_fan_out": (False, None), "layer_replication": (None, []), "alora_invocation_tokens": (None, []),
}  # fmt: skip
# Linear layers that peft 0.21 mistakes for experts because of their names, by model_type. A mixture may also have dense
# layers. Source: its transformers_weight_conversion.py.
TAKEN_FOR_EXPERTS = {"qwen3_moe": (".gate_proj", ".up_proj", ".down_proj")}
# Adapter settings by the flag that sets them. modules_to_save is missing because its tensors are compared instead.
OURS = {
    "lora_r": "r", "lora_alpha": "lora_alpha", "lora_bias": "bias", "use_rslora": "use_rslora", "use_dora": "use_dora",
    "lora_rank_pattern": "rank_pattern", "lora_alpha_pattern": "alpha_pattern",
}  # fmt: skip


def own(args: ModelArguments) -> Flags:
    """Return the flags of LoRA."""
    return args.own["lora"]


def check_lora(args: ModelArguments) -> None:
    """Raise ConfigError if a package for LoRA or quantization is missing, or --lora_weight_path doesn't fit."""
    for is_needed, flag, package, extra in (
        (own(args).lora_enable, "--lora_enable", "peft", "lora"),
        (own(args).bits < 16, f"--bits {own(args).bits}", "bitsandbytes", "qlora"),
    ):
        try:
            if is_needed:
                importlib.import_module(package)
        except ImportError as error:
            raise ConfigError(
                f"{flag} needs {package}, but it can't be imported ({error}): pip install 'llava_ds[{extra}]'"
            ) from error
    if own(args).lora_enable and own(args).lora_weight_path is not None and (problems := adapter_problems(args)):
        raise ConfigError("\n".join(problems))


def linear_names(language_model: nn.Module) -> list[str]:
    """Return the full names of a language model's linear layers, except its output layer: those that --bits packs.

    Call it before add_lora. Source: LLaVA's find_all_linear_names, whose last names match the same layers.
    """
    output = language_model.get_output_embeddings()
    names = [n for n, m in language_model.named_modules() if isinstance(m, nn.Linear) and m is not output]
    if not names:
        raise ConfigError(
            f"--lora_enable: {type(language_model).__name__} has no linear layers for LoRA except its output layer: "
            "train it without LoRA, or use another model"
        )
    return names


@dataclass(frozen=True)
class Target:
    """A layer with LoRA: its name in the model and in peft's files, LoRA's rank, and alpha.

    weight: name of the weight that LoRA changes. halves: prefix of the names of A and B. For experts, name is the
    tensor that stacks a layer's expert matrices, and is_stacked is True.
    """

    name: str
    outer: str
    rank: int
    alpha: float
    halves: str
    is_stacked: bool = False

    @property
    def weight(self) -> str:
        return self.name if self.is_stacked else f"{self.name}.weight"

    def scale(self, args: ModelArguments) -> float:
        """Return the factor by which the product B A is scaled."""
        return self.alpha / (math.sqrt(self.rank) if own(args).use_rslora else self.rank)


@dataclass(frozen=True)
class LoraLayout:
    """The layers of a model with LoRA, and the modules that train in full.

    saved: names of the --modules_to_save modules in the model; rename: maps a parameter's name in the model to the
    class that peft opens an adapter over; parts: the parts with LoRA.
    """

    targets: tuple[Target, ...]
    saved: tuple[str, ...]
    rename: Callable[[str], str]
    parts: frozenset[str]

    def holds(self, name: str) -> bool:
        """Return True if a trained parameter is stored in the adapter's file: it is in a part with LoRA, or saved."""
        return name.partition(".")[0] in self.parts or self.is_saved(name)

    def is_saved(self, name: str) -> bool:
        """Return True for a parameter of a module of --modules_to_save."""
        return any(name.startswith(f"{module}.") for module in self.saved)

    def of_module(self, name: str) -> str:
        """Return a module's name in peft's files."""
        return self.rename(f"{name}.weight").removesuffix(".weight")


def lora_layout(
    model: nn.Module, args: ModelArguments, architecture: Architecture | None, text_config: PreTrainedConfig
) -> LoraLayout:
    """Choose the layers of a LlavaModel that get LoRA. Call it before add_lora.

    Raises ConfigError if a name in the flags matches no layer, a part has no layer with LoRA, or a rank is too high.
    """
    rename = _llavas_names(args) if architecture is None else architecture.names(text_config).from_part
    layout = LoraLayout((), (), rename, own(args).adapted_parts)
    saved = _saved_modules(model, args, layout)
    layout = LoraLayout((), saved, rename, layout.parts)
    output = model.language_model.get_output_embeddings()
    linear = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and module is not output
        and name.partition(".")[0] in layout.parts
        and not layout.is_saved(f"{name}.weight")
    }
    if "language_model" in layout.parts:
        linear_names(model.language_model)  # raises if there is no linear layer
    outer = {name: layout.of_module(name) for name in linear}
    stacked = {name: layout.rename(name) for name in _stacked_names(model, layout)}
    wanted = _wanted(args, list(outer.values()), list(stacked.values()))
    outer |= stacked
    ranks, alphas = (patterns_of(getattr(own(args), f"lora_{which}_pattern")) for which in ("rank", "alpha"))
    for which, patterns in (("rank", ranks), ("alpha", alphas)):
        for pattern in patterns:
            if not any(_matches(pattern, each) for each in outer.values()):
                raise ConfigError(f"--lora_{which}_pattern: {pattern} matches no layer: {_some(outer.values())}")
    chosen = [name for name, there in outer.items() if there in wanted]
    targets = [
        Target(
            name,
            outer[name],
            _first(ranks, outer[name], own(args).lora_r),
            _first(alphas, outer[name], own(args).lora_alpha),
            _wrap(name, chosen) if name in stacked else name,
            name in stacked,
        )
        for name in chosen
    ]
    _refuse_for_experts(args, targets, text_config)
    for part in sorted(layout.parts - {target.name.partition(".")[0] for target in targets}):
        named = next(word for word, name in LORA_PARTS.items() if name == part)
        raise ConfigError(
            f"--lora_modules {own(args).lora_modules}: no layer of {named} gets LoRA: leave it out, or name some of "
            "its linear layers with --lora_target_modules"
        )
    if changes_base(own(args)):
        for target in targets:
            width = min(linear[target.name].weight.shape)
            if width and target.rank > width:
                raise ConfigError(
                    f"--init_lora_weights {own(args).init_lora_weights}: {target.outer} is a matrix of rank {width}, "
                    f"and LoRA's rank is {target.rank}: lower --lora_r or --lora_rank_pattern"
                )
    return LoraLayout(tuple(targets), saved, rename, layout.parts)


def _llavas_names(args: ModelArguments) -> Callable[[str], str]:
    def rename(name: str) -> str:
        if name.startswith(formats.TOWER):
            return formats.LLAVA_TOWER + name.removeprefix(formats.TOWER)
        return formats.projector_to_llava(name, args.mm_projector_type)

    return rename


def _stacked_names(model: nn.Module, layout: LoraLayout) -> list[str]:
    """Return the names of tensors that stack a layer's expert matrices, in the parts with LoRA."""
    return [
        name
        for name, parameter in model.named_parameters()
        if name.rpartition(".")[2] in STACKED and name.partition(".")[0] in layout.parts and not layout.is_saved(name)
    ]


def _wrap(name: str, chosen: list[str]) -> str:
    """Return the name of peft's wrapper for an experts tensor: the last of STACKED with LoRA is the outermost."""
    experts, _, kind = name.rpartition(".")
    is_inner = any(f"{experts}.{other}" in chosen for other in STACKED[STACKED.index(kind) + 1 :])
    return f"{experts}.base_layer" if is_inner else experts


def _refuse_for_experts(args: ModelArguments, targets: list[Target], text_config: PreTrainedConfig) -> None:
    """Raise ConfigError for options that peft lacks for experts, and for layers that peft mistakes for experts."""
    stacked = next((target.outer for target in targets if target.is_stacked), None)
    found = [
        f"{flag}: the tensor {stacked} holds all experts of a layer, {why}, or leave experts out of "
        "--lora_target_modules"
        for flag, is_given, why in (
            (
                f"--lora_dropout {own(args).lora_dropout}",
                own(args).lora_dropout,
                "which peft has no dropout for: give 0",
            ),
            ("--use_dora", own(args).use_dora, "which peft has no DoRA for: leave the flag out"),
            (
                f"--init_lora_weights {own(args).init_lora_weights}",
                changes_base(own(args)),
                "which peft does not decompose: give true or gaussian",
            ),
        )
        if stacked is not None and is_given
    ]
    taken = TAKEN_FOR_EXPERTS.get(text_config.model_type, ())
    if dense := next((t.outer for t in targets if not t.is_stacked and t.outer.endswith(taken)), None):
        found.append(
            f"--lora_target_modules {own(args).lora_target_modules}: in a {text_config.model_type} peft treats "
            f"{dense}, a layer without experts, as experts when it opens the adapter: name other layers, like q_proj"
        )
    if found:
        raise ConfigError("\n".join(found))


def _wanted(args: ModelArguments, outer: list[str], stacked: list[str]) -> set[str]:
    """Return the layers named by --lora_target_modules, including experts; without names, all linear layers.

    Source: peft's check_target_module_exists.
    """
    given = own(args).lora_target_modules
    if given is None:
        return set(outer)
    outer = [*outer, *stacked]
    if is_pattern(given):
        found = {name for name in outer if re.fullmatch(given, name)}
        if not found:
            raise ConfigError(f"--lora_target_modules {given} matches no layer's whole name: {_some(outer)}")
        return found
    found = set()
    for word in given.split(","):
        named = {name for name in outer if name == word or name.endswith(f".{word}")}
        if not named:
            raise ConfigError(f"--lora_target_modules: no layer's name ends in {word}: {_some(outer)}")
        found |= named
    return found


def _some(outer) -> str:
    names = sorted({name.rpartition(".")[2] for name in outer})
    first = next(iter(outer), None)
    return f"layers are called {', '.join(names[:12])}, the first of them {first}"


def _saved_modules(model: nn.Module, args: ModelArguments, layout: LoraLayout) -> tuple[str, ...]:
    """Return the outermost modules whose names end in a name of --modules_to_save."""
    if own(args).modules_to_save is None:
        return ()
    words, found = own(args).modules_to_save.split(","), []
    outer = {}
    for part in ("vision_tower.tower", "projector", "language_model"):
        for name, module in model.get_submodule(part).named_modules(prefix=part):
            if name not in ("projector", "language_model", "projector.layers", "projector.connector") and any(
                True for _ in module.parameters()
            ):
                with contextlib.suppress(KeyError):
                    outer[name] = layout.of_module(name)
    for word in words:
        named = [name for name, there in outer.items() if there == word or there.endswith(f".{word}")]
        if not named:
            raise ConfigError(f"--modules_to_save: no module's name ends in {word}: {_some(outer.values())}")
        found += named
    saved = [name for name in found if not any(name.startswith(f"{other}.") for other in found)]
    llm = model.language_model
    ends = [llm.get_input_embeddings(), llm.get_output_embeddings()]
    if ends[0].weight is ends[1].weight:
        for name in saved:
            if any(end in ends for end in model.get_submodule(name).modules()):
                raise ConfigError(
                    f"--modules_to_save {own(args).modules_to_save}: {outer[name]} shares its weight with the model's "
                    "other end, but peft would train it separately: leave it out"
                )
    linear = any(isinstance(module, nn.Linear) for name in saved for module in model.get_submodule(name).modules())
    if own(args).packs and linear:
        raise ConfigError(
            f"--modules_to_save {own(args).modules_to_save} can't be used with --bits {own(args).bits}: packed "
            "weights can't be trained, leave one out"
        )
    return tuple(dict.fromkeys(saved))


def patterns_of(text: str | None) -> dict[str, int]:
    """Parse --lora_rank_pattern or --lora_alpha_pattern; flags.py has checked it."""
    return {} if text is None else json.loads(text)


def _matches(pattern: str, outer: str) -> bool:
    """Match a layer's name. Source: peft's get_pattern_key."""
    return re.match(rf"(.*\.)?({pattern})$", outer) is not None


def _first(patterns: dict[str, int], outer: str, default: int) -> int:
    return next((value for pattern, value in patterns.items() if _matches(pattern, outer)), default)


def peft_config(args: ModelArguments, targets: list[str], rank: int, alpha: float):
    """Return a peft.LoraConfig for `targets`, layers that share one rank and alpha."""
    from peft import LoraConfig

    return LoraConfig(
        r=rank,
        lora_alpha=alpha,
        lora_dropout=own(args).lora_dropout,
        bias=own(args).lora_bias,
        target_modules=targets,
        task_type="CAUSAL_LM",
        base_model_name_or_path=args.model_name_or_path,
        use_rslora=own(args).use_rslora,
        use_dora=own(args).use_dora,
        init_lora_weights=True if own(args).init_lora_weights == "true" else own(args).init_lora_weights,
    )


def add_lora(
    model: nn.Module,
    layout: LoraLayout,
    args: ModelArguments,
    seed: int,
    start: dict[str, torch.Tensor] | None = None,
) -> None:
    """Add LoRA to the layout's layers, in the model's precision, and freeze the rest of the parts with LoRA.

    By default, A depends only on the seed and B is zero. With some --init_lora_weights, A and B are computed from the
    weight and their product is subtracted from it; model.lora_start then holds both on the CPU, by name. Call this
    outside zero.Init, because B would not be zero inside. Under ZeRO-3, weights are gathered one at a time if a variant
    reads them, and deepspeed.initialize partitions LoRA. start: initial matrices of a resumed run, if they were
    subtracted.
    """
    dtype = model.language_model.get_input_embeddings().weight.dtype
    model.lora, model.lora_start = layout, {}
    with torch.random.fork_rng(devices=[]):  # peft initialises LoRA on the CPU in float32
        torch.manual_seed(seed + 1)  # the projector uses the seed itself
        for target in layout.targets:
            if target.is_stacked:
                continue
            linear = model.get_submodule(target.name)
            with _gathered(linear.weight, args):
                added = _with_lora(linear, target, args, dtype, start)
                if changes_base(own(args)) and not linear.weight.is_meta:
                    halves = {half: added.get_parameter(half.removeprefix(".")) for half in (A, B)}
                    model.lora_start |= {
                        target.name + half: p.detach().to("cpu", copy=True) for half, p in halves.items()
                    }
            parent, _, child = target.name.rpartition(".")
            setattr(model.get_submodule(parent), child, added)
        for place in dict.fromkeys(each.name.rpartition(".")[0] for each in layout.targets if each.is_stacked):
            beside = [each for each in layout.targets if each.name.rpartition(".")[0] == place]
            _add_to_experts(model, place, beside, args, dtype)
    choose_adapters(model, own(args).lora_bias)


def _add_to_experts(
    model: nn.Module, place: str, targets: list[Target], args: ModelArguments, dtype: torch.dtype
) -> None:
    """Add LoRA to the stacked expert tensors of a layer. place: name of the experts' module in the model."""
    parameters = {target.name.rpartition(".")[2]: target for target in targets}
    config = peft_config(args, [], own(args).lora_r, own(args).lora_alpha)
    config.target_parameters = [f"experts.{name}" for name in parameters]
    config.rank_pattern = {name: target.rank for name, target in parameters.items()}
    config.alpha_pattern = {name: target.alpha for name, target in parameters.items()}
    added = wrap_experts(model.get_submodule(place), config, ADAPTER)
    for name, tensor in added.named_parameters():
        if is_lora(f".{name}"):
            tensor.data = tensor.data.to(dtype)
    model.set_submodule(place, added)


def _gathered(weight: nn.Parameter, args: ModelArguments) -> contextlib.AbstractContextManager:
    """Gather a partitioned weight for a variant that reads it. On exit, the first rank's changes reach all ranks."""
    if not hasattr(weight, "ds_id") or not (changes_base(own(args)) or own(args).use_dora):
        return contextlib.nullcontext()
    import deepspeed  # slow to import, and only partitioned parameters need it

    return deepspeed.zero.GatheredParameters([weight], modifier_rank=0 if changes_base(own(args)) else None)


@torch.no_grad()
def _with_lora(
    linear: nn.Linear, target: Target, args: ModelArguments, dtype: torch.dtype, start: dict[str, torch.Tensor] | None
) -> nn.Module:
    """Wrap a linear layer, with an unpartitioned weight, in peft's layer."""
    from peft import inject_adapter_in_model

    splits, weight = changes_base(own(args)) and not linear.weight.is_meta, linear.weight
    before = weight.detach().clone() if splits else None
    config = peft_config(args, ["layer"], target.rank, target.alpha)
    if start is not None or weight.is_meta:
        config.init_lora_weights = True  # values from `start` replace these, so the costly initialisation is skipped
    holder = nn.Module()
    holder.layer = linear
    inject_adapter_in_model(config, holder, ADAPTER)
    added = holder.layer
    for name, parameter in added.named_parameters():
        if is_lora(f".{name}"):
            parameter.data = parameter.data.to(dtype)  # peft keeps them in float32 next to packed weights
    if splits:
        a, b = (added.get_parameter(half.removeprefix(".")) for half in (A, B))
        for half, parameter in ((A, a), (B, b)):
            if start is not None:
                parameter.data.copy_(start[target.name + half])
        # peft subtracted the float32 product, but A and B may have been rounded since.
        weight.data = merged_weight(before, [(a, b, -target.scale(args))])
    return added


def start_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return LoRA's initial matrices by name if they were subtracted from the weights, otherwise an empty dict."""
    return getattr(model, "lora_start", {})


def read_start(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Read LoRA's initial matrices, by name in the model, from a run that subtracted them from the weights.

    Raises DataError if they are missing.
    """
    file = checkpoint / START_FILE
    if not file.is_file():
        raise DataError(
            f"{checkpoint} has no {START_FILE}, and LoRA's weights mean nothing without it: use another checkpoint"
        )
    return safe_load.load(file)


def is_lora(name: str) -> bool:
    """Return True for parameters that LoRA adds."""
    return ".lora_A." in name or ".lora_B." in name or ".lora_magnitude_vector." in name


def choose_adapters(model: nn.Module, bias: str) -> None:
    """Choose the trained parameters: LoRA, the biases of --lora_bias (peft's values), and --modules_to_save.

    Freezes all other parameters of the language model and of the parts with LoRA.
    """
    layout: LoraLayout = model.lora
    for name, parameter in model.named_parameters():
        part = name.partition(".")[0]
        if part not in layout.parts and part != "language_model":
            if layout.is_saved(name):
                parameter.requires_grad_(True)
            continue
        trained = is_lora(name) or layout.is_saved(name)
        if part in layout.parts:
            trained |= bias == "all" and "bias" in name
            trained |= bias == "lora_only" and name.endswith(".base_layer.bias")
        parameter.requires_grad_(trained)


def lora_layers(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the name and module of every peft layer with LoRA (with base_layer, lora_A, lora_B and scaling)."""
    for name, layer in module.named_modules():
        if hasattr(layer, "lora_A") and hasattr(layer, "base_layer"):
            yield name, layer


def plain_name(name: str) -> str | None:
    """Return a parameter's name without LoRA ("x.base_layer.weight" becomes "x.weight"); None for LoRA's own."""
    return None if is_lora(name) else name.replace(".base_layer", "")


def to_peft(name: str) -> str:
    """Map a parameter name in the class that peft wraps to its name in peft's files, without the adapter name."""
    return PEFT_PREFIX + name.removesuffix(".weight" if name.endswith(MAGNITUDE) else "").replace(f".{ADAPTER}", "")


def from_peft(name: str) -> str:
    """Invert to_peft. Also accepts names with an adapter name, because some programs write it."""
    name = name.removeprefix(PEFT_PREFIX)
    name = re.sub(r"\.lora_magnitude_vector(?:\.default)?(?:\.weight)?$", MAGNITUDE, name)
    return re.sub(r"\.(lora_[AB])\.(?:default\.)?weight$", rf".\1.{ADAPTER}.weight", name)


def over_unchanged_weights(tensors: dict[str, torch.Tensor], start: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Convert LoRA's tensors for use with the original weights. Their rank and alpha double.

    start: the initial matrices that were subtracted from the weights, or empty. Source: peft's subtract_mutated_init.
    """
    changed = dict(tensors)
    for name, before in start.items():
        before = before.to(tensors[name].dtype)
        changed[name] = (
            torch.cat([tensors[name], before]) if name.endswith(A) else torch.cat([tensors[name], -before], 1)
        )
    return changed


# The following functions read the adapter of --lora_weight_path.


def adapter_problems(args: ModelArguments) -> list[str]:
    """Return the reasons why training can't start from --lora_weight_path, without reading weights."""
    folder = Path(own(args).lora_weight_path)
    where = f"--lora_weight_path {folder}"
    if adapter_file(folder) is None:
        return [f"{where}: it contains no {' or '.join(ADAPTER_FILES)}: give a folder of peft or LLaVA"]
    try:
        config = read_json(folder / ADAPTER_CONFIG, where)
    except ConfigError as error:
        return [str(error)]
    kind = config.get("peft_type")
    if kind != "LORA":
        return [f"{where} has an adapter of type {kind}: only LORA is supported"]
    problems = []
    for ours, theirs in OURS.items():
        value, found = getattr(own(args), ours), config.get(theirs)
        if theirs.endswith("_pattern"):
            value, found = patterns_of(value), found or {}
        elif isinstance(value, bool):
            found = bool(found)
        if found != value:
            given = f"'{json.dumps(found)}'" if isinstance(found, dict) else found
            now = getattr(own(args), ours)
            problems.append(f"{where} was trained with {theirs} {given}, but --{ours} is {now}: give --{ours} {given}")
    return problems + [
        f"{where} was trained with {name} {config[name]}, but that is not supported: start from another adapter"
        for name, plain in PLAIN.items()
        if config.get(name) not in plain
    ]


def names_from_peft(model: nn.Module, trained: Collection[str]) -> Callable[[str], str]:
    """Return a function that maps parameter names in peft's files to the names in `trained`. model: with LoRA.

    Old versions of peft, without base_layer, stored a layer's bias under its plain name: it is mapped as well.
    """
    layout: LoraLayout = model.lora
    known = {layout.rename(name): name for name in trained}
    known |= {outer.replace(".base_layer.", "."): name for outer, name in known.items() if not is_lora(name)}

    def rename(name: str) -> str:
        found = from_peft(name)
        return known.get(found, found)

    return rename
