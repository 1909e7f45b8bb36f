# E experts of a layer, k experts per token, D width of the language model
"""Upcycling: replace a dense language model's MLPs by mixtures of experts that start as copies of the MLP.

Layers and names are MoE-LLaVA's (arXiv 2401.15947, stage 3): layers.N.mlp.deepspeed_moe.gate.wg.weight (E, D) is the
router, layers.N.mlp.deepspeed_moe.experts.deepspeed_experts.I.* is expert I with the MLP's names; use_residual adds
layers.N.mlp.mlp.* and layers.N.mlp.coefficient.*. The configuration's field moe lists the layers.
"""

import copy
import dataclasses
import math
import zlib
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.initialization import no_init_weights
from transformers.modeling_layers import GradientCheckpointingLayer

from llava_ds.config.arguments import Arguments, ModelArguments
from llava_ds.config.properties import Feature, clashes, features
from llava_ds.constants import ConfigError
from llava_ds.extensions.mixtures.flags import Flags
from llava_ds.extensions.mixtures.kinds import UPCYCLED, is_mixture, is_upcycled
from llava_ds.extensions.mixtures.upcycled import GATE, NAMES, Mixture, expert_of
from llava_ds.model.open.weights import Sources, Weights

OF_UPCYCLED = frozenset({"capacity_factor", "min_capacity", "train_modules"})  # flags that need upcycled experts
BROKEN = ("dense_mlps", "routerless_mlps")  # entries of PROPERTIES that are no longer true of an upcycled model


def own(args: ModelArguments) -> Flags:
    """Return the run's mixture flags, or the defaults."""
    return args.own.get("mixtures", Flags())


def upcycle(
    config: PreTrainedConfig, sources: Sources, args: ModelArguments
) -> tuple[PreTrainedConfig, Sources, list[str]]:
    """Apply the mixture flags to configuration and sources of a dense language model. Also returns lines for the log.

    Raises ConfigError if the model has experts or its layers have no MLP.
    """
    config = upcycled_config(config, args)
    mixture, names = Mixture.of(config), layer_names(config)
    blocks = [f"{names[layer]}.mlp" for layer in mixture.layers]
    change = partial(Upcycled, blocks=blocks, mixture=mixture, width=config.hidden_size)
    source = sources.language_model
    source = dataclasses.replace(source, changes=(*source.changes, change))
    lines = [
        f"upcycled: layers {', '.join(map(str, mixture.layers))} of {len(names)} get {mixture.num_experts} experts, "
        f"{mixture.top_k} per token, each a copy of the layer's MLP"
    ]
    if mixture.top_k == 1:
        lines.append(
            "--top_k_experts 1 scales an expert's output by its probability: the model's outputs change at the start"
        )
    return config, dataclasses.replace(sources, language_model=source), lines


def upcycled_config(config: PreTrainedConfig, args: ModelArguments) -> PreTrainedConfig:
    """Copy a dense language model's configuration and add the requested mixtures. Raises as upcycle does."""
    where = f"--moe_enable True, but --model_name_or_path {args.model_name_or_path}"
    if is_mixture(config) or is_upcycled(config):
        raise ConfigError(f"{where} already has experts: leave --moe_enable out to train it unchanged")
    names = layer_names(config)
    if not names:
        raise ConfigError(f"{where} is a {config.model_type}, and its layers have no MLP: use another model")
    config = copy.deepcopy(config)
    setattr(config, UPCYCLED, _written(own(args), _chosen(own(args), len(names))))
    return config


def _chosen(flags: Flags, num_layers: int) -> list[int]:
    """Choose the layers that get experts. Source: MoE-LLaVA's initialize_moe_modules."""
    if flags.moe_layers_idx is None:
        half = num_layers // 2
        chosen = {
            "first_half": range(half),
            "second_half": range(half, num_layers),
            "sparse": range(0, num_layers, 2),
            "dense": range(num_layers),
        }
        return list(chosen[flags.moe_mode])
    words = flags.moe_layers_idx.split(",")
    wrong = [word for word in words if not word.isdecimal() or int(word) >= num_layers]
    if wrong or len(set(words)) < len(words):
        found = wrong[0] if wrong else "a layer twice"
        raise ConfigError(f"--moe_layers_idx contains {found}: give distinct layers from 0 to {num_layers - 1}")
    return sorted(map(int, words))


def _written(flags: Flags, layers: list[int]) -> dict[str, object]:
    """Build the configuration's field moe with all keys that MoE-LLaVA's loader requires. MoE-LLaVA's eval drops tokens
    above a capacity, so set it so high that none are dropped.
    """
    return {
        "moe_enable": True,
        "moe_mode": flags.moe_mode if flags.moe_layers_idx is None else "custom",
        "moe_layers_idx": layers,
        "num_experts": [flags.num_experts] * len(layers),
        "top_k_experts": flags.top_k_experts,
        "use_residual": flags.use_residual,
        "ep_size": 1,
        "capacity_factor": flags.capacity_factor or flags.num_experts / flags.top_k_experts,
        "eval_capacity_factor": flags.num_experts / flags.top_k_experts,
        "min_capacity": flags.min_capacity,
        "router_aux_loss_coef": 0.0,
        "train_modules": [],
    }


def layer_names(config: PreTrainedConfig) -> list[str]:
    """List the repeated layers' names in order; empty if any lacks an MLP."""
    with no_init_weights(), torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    found = _layers(model)
    return list(found) if all(isinstance(getattr(layer, "mlp", None), nn.Module) for layer in found.values()) else []


def _layers(language_model: nn.Module) -> dict[str, nn.Module]:
    return {n: m for n, m in language_model.named_modules() if isinstance(m, GradientCheckpointingLayer)}


def add_experts(language_model: nn.Module, config: PreTrainedConfig, args: ModelArguments) -> None:
    """Replace the MLPs with expert layers. Their weights are uninitialized until the model is loaded."""
    from llava_ds.extensions.mixtures.expert_layer import ExpertLayer  # slow, because it imports DeepSpeed

    flags, mixture, layers = own(args), Mixture.of(config), list(_layers(language_model).values())
    for number in mixture.layers:
        layer = layers[number]
        layer.mlp = ExpertLayer(layer.mlp, config.hidden_size, mixture, flags.capacity_factor, flags.min_capacity)


class Upcycled:
    """A language model's weights with each MLP copied to every expert and randomly initialized routers.

    blocks: names of the MLPs. A router's seed is derived from its name, so every rank and every export gets the same
    weights.
    """

    def __init__(self, below: Weights, *, blocks: list[str], mixture: Mixture, width: int) -> None:
        self.path, self._below, self._mixture = below.path, below, mixture
        self._blocks = blocks
        self._copies = {name: list(self._places(name)) for name in below.shapes}
        self.shapes = {place: shape for name, shape in below.shapes.items() for place in self._copies[name]}
        self._fresh = {f"{block}.{GATE}": (mixture.num_experts, width) for block in blocks}
        if mixture.use_residual:
            self._fresh |= {f"{block}.coefficient.weight": (2, width) for block in blocks}
            self._fresh |= {f"{block}.coefficient.bias": (2,) for block in blocks}
        self.shapes |= self._fresh
        self.notes = (*below.notes, f"{len(blocks)} MLPs copied to {mixture.num_experts} experts each")

    def _places(self, name: str) -> Iterator[str]:
        block = next((block for block in self._blocks if name.startswith(f"{block}.")), None)
        if block is None:
            yield name
            return
        rest = name.removeprefix(f"{block}.")
        for expert in range(self._mixture.num_experts):
            yield f"{block}.{NAMES}{expert}.{rest}"
        if self._mixture.use_residual:
            yield f"{block}.mlp.{rest}"

    def tensors(self) -> Iterator[tuple[str, Callable[[], torch.Tensor]]]:
        for name, read in self._below.tensors():
            for place in self._copies[name]:
                yield place, read
        for name, shape in self._fresh.items():
            yield name, partial(_random, name, shape)


def _random(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Initialize like torch's linear layer: uniform weights; zeros for a bias."""
    if len(shape) == 1:
        return torch.zeros(shape)
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    bound = 1 / math.sqrt(shape[1])
    return torch.empty(shape).uniform_(-bound, bound, generator=generator)


def trained_of(names: list[str], train_modules: str | None) -> set[str]:
    """Select the parameter names that --train_modules matches, by whole words between dots.

    Raises ConfigError if a word matches no name or no expert is selected.
    """
    if train_modules is None:
        return set(names)
    found: set[str] = set()
    for word in train_modules.split(","):
        named = {name for name in names if f".{word}." in f".{name}."}
        if not named:
            parts = sorted({part for name in names for part in name.split(".") if not part.isdecimal()})
            raise ConfigError(f"--train_modules {word} matches no parameter name: use words from {', '.join(parts)}")
        found |= named
    if not any(expert_of(name) for name in found):
        raise ConfigError(
            f"--train_modules {train_modules} leaves all experts frozen, but DeepSpeed's optimizers need some to "
            "train: add a matrix of the experts"
        )
    return found


def upcycled_problems(args: Arguments, config: PreTrainedConfig) -> Iterator[str]:
    """Yield a line per setting that conflicts with an upcycled model, or that needs one if the model isn't upcycled."""
    flags = own(args.model)
    if not is_upcycled(config):
        needing = sorted(args.given & OF_UPCYCLED) or (["ep_size"] if flags.ep_size > 1 else [])
        if needing and not flags.moe_enable:
            yield (
                f"--{needing[0]} needs experts made with --moe_enable True, but --model_name_or_path "
                f"{args.model.model_name_or_path} has none: give --moe_enable True, or leave it out"
            )
        return
    if args.model.tune_mm_mlp_adapter:
        yield ("--tune_mm_mlp_adapter True writes only a projector, but the language model is upcycled: leave it out")
    yield from clashes([*features(args), Feature("an upcycled language model", breaks=BROKEN)])
    num_experts = Mixture.of(config).num_experts
    if num_experts % flags.ep_size:
        sizes = [n for n in range(1, num_experts + 1) if num_experts % n == 0]
        yield (
            f"--ep_size {flags.ep_size} does not divide the {num_experts} experts of a layer: give one of "
            f"{', '.join(map(str, sizes))}"
        )


def capacity_note(args: ModelArguments) -> str | None:
    """Return a warning if tokens are dropped."""
    factor = own(args).capacity_factor
    if factor is None:
        return None
    return (
        f"--capacity_factor {factor:g}: each expert takes up to this multiple of an even share of a "
        "micro-batch's tokens and "
        "drops the rest, so the result depends on which samples share a micro-batch and on the number of ranks"
    )


def check_stage(config: PreTrainedConfig, raw: dict) -> None:
    """Raise ConfigError for ZeRO-3 with an upcycled model."""
    zero = raw.get("zero_optimization")
    if is_upcycled(config) and isinstance(zero, dict) and zero.get("stage") == 3:
        raise ConfigError(
            "zero_optimization.stage is 3 in the DeepSpeed JSON, but an upcycled model uses DeepSpeed's expert "
            "layer (deepspeed.moe), limited to stages 0 to 2: give ds_configs/zero2.json, and --ep_size to "
            "divide the experts over ranks"
        )
