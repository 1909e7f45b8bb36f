"""Compute the sizes of a model's tensors, trained and frozen, without loading weights. Estimates use them."""

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import nn
from transformers import AutoConfig, CLIPVisionConfig, PreTrainedConfig
from transformers.initialization import no_init_weights
from transformers.modeling_layers import GradientCheckpointingLayer

from llava_ds.config.arguments import (
    Arguments,
    DataArguments,
    ModelArguments,
    TrainingArguments,
    adapted_parts,
    trained_parts,
)
from llava_ds.constants import ConfigError
from llava_ds.engine.activation_checkpointing import repeated_layers
from llava_ds.engine.ds_config.parallel import check_model
from llava_ds.engine.param_groups import choose_trainable, parameter_groups
from llava_ds.engine.placement import divided
from llava_ds.extensions.active import active, text_part
from llava_ds.extensions.planning.named_models import NAMED
from llava_ds.extensions.planning.tower_shape import TowerShape, tower_shape
from llava_ds.model.attention import MAX_FUSED_WIDTH
from llava_ds.model.families.language import (
    attention_widths,
    has_state,
    head_width,
    layer_configs,
    mlp_width,
    num_attention_layers,
)
from llava_ds.model.llava import LlavaModel, assemble, layer_classes
from llava_ds.model.open.folder import take_from_model
from llava_ds.model.open.model_plan import fit_vocabulary, read_parts
from llava_ds.model.open.probe import check_language_model
from llava_ds.model.open.tower import plan_tower
from llava_ds.model.vision import TowerPlan
from llava_ds.tracking.flops import ModelFlops, flops_of_model

LEAST_COUNT, MOST_COUNT = 10**6, 10**14  # limits on the number of parameters; others must be a typo
# Assumed load of the busiest expert, relative to an even share. In upcycled models, all experts compute that many rows.
UNEVEN = 1.5
TENSORS_OF_A_COUNT = 1000  # assumed number of tensors if only the number of parameters is known

LLAMAS_LAYER = {
    "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj",
    "mlp.down_proj", "input_layernorm", "post_attention_layernorm",
}  # fmt: skip
CLIP_L_336 = {
    "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16,
    "image_size": 336, "patch_size": 14,
}  # fmt: skip


@dataclass(frozen=True)
class Part:
    """A part of the model: its parameters and how many of them are trained."""

    name: str
    num_parameters: int
    num_trained: int


@dataclass(frozen=True)
class TextShape:
    """Widths of the language model on one rank, averaged if layers differ. Query and key widths are sums over heads.

    trained: True if the training stage trains the weights. intermediate: MLP width; for a mixture of experts, the width
    of an MLP that saves as much for backward as a token's experts. routed: True for a mixture. expert_rows: expert uses
    per token in an upcycled model, summed over layers. is_llamas: True if layers have exactly Llama's tensors.
    adapter_rank: sum of the ranks of a layer's adapters. adapter_dropped: widths of adapter inputs with dropout.
    adapter_scaled: widths of outputs that DoRA saves twice. adapter_read: elements of the largest matrix with DoRA.
    tied: True if the output layer is the embedding. norms: norms of the hidden states per layer. has_head_norms: True
    if query and key are normalised. fp32_norms: True if norms multiply by weights in fp32, as in Gemma and Qwen3.5.
    in_blocks: share of attention layers with a separate pass for image tokens that see each other. convolved, gated:
    widths of a recurrent layer's convolution input, and of its values and gate, averaged over all layers.
    layer_embedding: width of embeddings added in each layer. rotary: width of the rotary angles of all layer kinds.
    largest: query, key and intermediate widths of the layer that saves most, if layers differ.
    """

    hidden: int
    intermediate: int
    num_layers: int
    query: int
    key: int
    num_heads: int
    vocab: int
    trained: bool
    is_llamas: bool
    tied: bool
    adapter_rank: int = 0
    adapter_dropped: int = 0
    adapter_scaled: int = 0
    adapter_read: int = 0
    routed: bool = False
    expert_rows: int = 0
    norms: int = 2
    has_head_norms: bool = False
    fp32_norms: bool = False
    in_blocks: float = 0.0
    convolved: int = 0
    gated: int = 0
    layer_embedding: int = 0
    rotary: int = 0
    largest: tuple[int, int, int] | None = None

    @property
    def largest_layer(self) -> "TextShape":
        """Return the shape with the widths of the layer that saves most. It has no image blocks."""
        if self.largest is None:
            return self
        query, key, intermediate = self.largest
        return replace(self, query=query, key=key, intermediate=intermediate, in_blocks=0.0)


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a model, in elements, that determine memory and speed.

    groups: trained tensors by optimizer group, in the optimizer's order. frozen: frozen tensors except packed ones.
    units: tensors that ZeRO-3 gathers together (a decoder layer, an embedding). text, tower and flops are None if only
    the number of parameters is known. packed: the tensors quantized by --bits, at packed_bits per weight plus
    scale_bits that ZeRO never partitions. tp: ranks that share the layers' matrices. ep: ranks that share an upcycled
    model's experts. parts: of the whole model; all other fields describe one rank. of_experts: per group, True if it
    holds experts; empty if no group does. stages: the shape of each pipeline stage. is_first: True if it has tower,
    projector and embedding. is_last: True if it has the output layer. second: parameters of frozen second models.
    """

    parts: tuple[Part, ...]
    groups: tuple[tuple[int, ...], ...]
    frozen: tuple[int, ...]
    units: tuple[tuple[int, ...], ...]
    text: TextShape | None = None
    tower: TowerShape | None = None
    packed: tuple[int, ...] = ()
    packed_bits: int = 16
    scale_bits: float = 0
    flops: ModelFlops | None = None
    tp: int = 1
    of_experts: tuple[bool, ...] = ()
    ep: int = 1
    stages: tuple["ModelShape", ...] = ()
    is_first: bool = True
    is_last: bool = True
    second: int = 0

    @property
    def num_parameters(self) -> int:
        return sum(part.num_parameters for part in self.parts)

    @property
    def num_trained(self) -> int:
        return sum(part.num_trained for part in self.parts)

    @property
    def trained_of_rank(self) -> int:
        """Trained elements on one of the ranks that share matrices or experts."""
        return sum(map(sum, self.groups))

    def copies(self, ranks: int) -> list[int]:
        """Return, per group, the number of ranks over which ZeRO divides it: for experts, only those that hold them."""
        return [ranks // self.ep if routed else ranks for routed in self.of_experts or [False] * len(self.groups)]

    @property
    def has_critic(self) -> bool:
        """True if a second model is trained on the same batches."""
        return any(part.name == "critic" for part in self.parts)

    @property
    def hidden_size(self) -> int:
        """The language model's width, or that of a 7B model if only the number of parameters is known."""
        return 4096 if self.text is None else self.text.hidden

    @property
    def tensors(self) -> tuple[int, ...]:
        """Sizes of all tensors that are not packed, trained or frozen."""
        return (*(size for group in self.groups for size in group), *self.frozen)


def shape_of_folders(args: Arguments) -> ModelShape:
    """Return the shape of the model in --model_name_or_path and --vision_tower, with the flag defaults of that model.

    Raises the same ConfigError as training.
    """
    args, _ = take_from_model(args)
    parts = read_parts(args.model)
    check_language_model(args.model.model_name_or_path, parts.text_config)
    text = parts.text_config
    if args.model.resize_token_embeddings:
        text, _, _ = fit_vocabulary(text, parts.sources, parts.open_tokenizer(), args.model)
    return shape_of(text, parts.tower, args)


def shape_named(name: str, args: Arguments) -> ModelShape:
    """Return the shape of a named model, or of a number of parameters like 13e9, all trained. Raises ConfigError for
    other names."""
    if name in NAMED:
        text = AutoConfig.for_model(**NAMED[name])
        return shape_of(text, plan_tower(CLIPVisionConfig(**CLIP_L_336), {}, "--model", args.model), args)
    try:
        count = int(float(name))
    except (ValueError, OverflowError):
        count = 0
    if count < LEAST_COUNT:
        raise ConfigError(
            f"--model {name} is unknown: choose from {', '.join(NAMED)}, give a number of parameters like 13e9, or "
            "name folders by --model_name_or_path and --vision_tower"
        )
    if count > MOST_COUNT:
        raise ConfigError(f"--model {name} has more parameters than can be estimated: give {MOST_COUNT:.0e} or fewer")
    return shape_of_count(count)


def shape_of_count(count: int) -> ModelShape:
    """Return a shape with only the number of parameters known: tensors of equal size, all trained."""
    size, rest = divmod(count, TENSORS_OF_A_COUNT)
    tensors = tuple(size + (i < rest) for i in range(TENSORS_OF_A_COUNT))
    return ModelShape((Part("model", count, count),), (tensors,), (), tuple((size,) for size in tensors))


def shape_of(text: PreTrainedConfig, tower: TowerPlan, args: Arguments) -> ModelShape:
    """Return the shape of any causal language model with any tower, composed and trained as the flags say.

    The model is built on the meta device, so tensors are counted as in training, with tied ones once. Raises
    ConfigError if it can't be trained on the flags' mesh.
    """
    for text_of in _functions("text_of", args, text):
        text = text_of(text, args.model)
    check_model(args, text)
    with no_init_weights(), torch.device("meta"):
        model = assemble(text, tower, args.model, torch.zeros(3), torch.zeros(3))
        is_llamas = _has_llamas_layers(model.language_model)
        flops = flops_of_model(model, text, tower, args.model)
        for add in _functions("add", args, text):
            add(model, tower.architecture, text, args.model)
        if args.traits.second_model:
            _add_critic(model, text, tower, args)
    packings = (packed(model, args.model) for packed in _functions("packed", args, text))
    packing = [found for found in packings if found is not None]
    packed, packed_bits, scale_bits = packing[0] if packing else (set(), 16, 0)
    choose_trainable(model, args)
    groups = parameter_groups(model, args)
    tp, ep, parts = args.size_of("tp"), args.size_of("ep"), active(args.own).mesh_parts
    elements = {p: p.numel() for p in model.parameters()}
    elements = divided(elements, model, parts, args.size_of)
    shared = {p for find in _functions("shared", args, text) for p in find(model)}
    elements = {p: n // ep if p in shared else n for p, n in elements.items()}
    whole = ModelShape(
        parts=tuple(
            Part(name, _numel(part.parameters()), _numel(p for p in part.parameters() if p.requires_grad))
            for name, part in model.named_children()
        ),
        groups=tuple(tuple(elements[p] for p in group["params"]) for group in groups),
        frozen=tuple(elements[p] for n, p in model.named_parameters() if not p.requires_grad and n not in packed),
        units=_units(model, elements),
        text=replace(_text_shape(model.language_model, text, args, is_llamas), in_blocks=_in_blocks(text, tower)),
        tower=tower_shape(model, tower, args),
        packed=tuple(p.numel() for n, p in model.named_parameters() if n in packed),
        packed_bits=packed_bits,
        scale_bits=scale_bits,
        flops=flops.of_rank(tp),
        tp=tp,
        of_experts=tuple(group.get("moe", False) for group in groups),
        ep=ep,
        second=sum(_folder_size(flags.frozen_folder) for flags in args.own.values()),
    )
    for part in (part for part in parts if part.owners is not None):
        owners = part.owners(model, whole.flops, tower, args.size_of(part.axis))
        whole = replace(whole, stages=tuple(_stages(model, whole, groups, *owners)))
    return whole


def _folder_size(folder: str | None) -> int:
    """Return the number of parameters of the model in a folder; 0 for None."""
    if folder is None:
        return 0
    model = ModelArguments(model_name_or_path=folder)
    return shape_of_folders(Arguments(model, DataArguments(), TrainingArguments(), frozenset())).num_parameters


def _stages(
    model: LlavaModel, whole: ModelShape, groups: list[dict], counts: list[int], found: dict[str, int]
) -> Iterator[ModelShape]:
    """Yield the shape of each pipeline stage. counts: layers per stage; found: the rank that holds each parameter."""
    stage_of = {p: found[name] for name, p in model.named_parameters()}
    output = model.language_model.get_output_embeddings().weight
    for stage, count in enumerate(counts):
        ends = {"is_first": stage == 0, "is_last": stage == len(counts) - 1}
        trained = [tuple(p.numel() for p in group["params"] if stage_of[p] == stage) for group in groups]
        # The last stage has a copy of a tied output layer, and the copy's gradient.
        copy = (output.numel(), output.numel()) if ends["is_last"] and stage_of[output] != stage else ()
        yield replace(
            whole,
            groups=tuple(filter(None, trained)),
            frozen=tuple(p.numel() for p, at in stage_of.items() if at == stage and not p.requires_grad) + copy,
            text=replace(whole.text, num_layers=count),
            flops=whole.flops.of_stage(count / whole.text.num_layers, **ends),
            **ends,
        )


def _in_blocks(text: PreTrainedConfig, tower: TowerPlan) -> float:
    if not tower.has_image_blocks:
        return 0.0
    return sum(attention_widths(text, tower.blocks_need_windows)) / sum(attention_widths(text))


def _text_shape(language_model: nn.Module, text: PreTrainedConfig, args: Arguments, is_llamas: bool) -> TextShape:
    hidden, num_layers, num_heads = text.hidden_size, text.num_hidden_layers, getattr(text, "num_attention_heads", 1)
    tp, widths = args.size_of("tp"), _widths_of_layers(text, args)
    query, key = (sum(each) // len(each) for each in list(zip(*widths))[:2])
    return TextShape(
        hidden=hidden,
        intermediate=sum(each[2] for each in widths) // len(widths) // tp,
        num_layers=num_layers,
        query=query // tp,
        key=key // tp,
        num_heads=max(1, num_heads // tp),
        vocab=language_model.get_output_embeddings().weight.shape[0],
        trained="language_model" in trained_parts(args.model) - adapted_parts(args.model),
        is_llamas=is_llamas,
        tied=_is_tied(language_model),
        **{
            name: n
            for found in _functions("widths", args, text)
            for name, n in found(language_model, text, args.model).items()
        },
        routed="routerless_mlps" in text_part(text).breaks(text),
        **_norms(language_model, hidden),
        **_state_widths(text),
        layer_embedding=getattr(text, "hidden_size_per_layer_input", None) or 0,
        rotary=sum({head_width(layer) for layer in layer_configs(text)}),
        largest=max(widths, key=lambda each: each[0] + each[1] + 2 * each[2]) if len(set(widths)) > 1 else None,
    )


def _widths_of_layers(text: PreTrainedConfig, args: Arguments) -> list[tuple[int, int, int]]:
    """Return each layer's query and key widths and TextShape.intermediate.

    If heads are too wide for FlashAttention, SDPA's kernel needs keys repeated for every query head.
    """
    found, layers = [], layer_configs(text)
    saving = (width(text, UNEVEN) for width in _functions("saving_width", args, text))
    saving = next((width for width in saving if width is not None), mlp_width(text))
    doubled = getattr(text, "num_kv_shared_layers", None) if getattr(text, "use_double_wide_mlp", False) else 0
    for i, layer in enumerate(layers):
        heads = getattr(layer, "num_attention_heads", 1)
        width = getattr(layer, "head_dim", None) or layer.hidden_size // heads
        key_heads = getattr(layer, "num_key_value_heads", None) or heads
        key = (heads if width > MAX_FUSED_WIDTH else key_heads) * width
        found.append((heads * width, key, saving * (1 + (i >= len(layers) - (doubled or 0)))))
    return found


def _norms(language_model: nn.Module, hidden: int) -> dict[str, object]:
    """Return TextShape's fields about norms, from module names and widths."""
    layers = repeated_layers(language_model)
    modules = dict(layers[0].named_modules()) if layers else {}
    norms = {n: m for n, m in modules.items() if "Norm" in type(m).__name__ and getattr(m, "weight", None) is not None}
    return {
        "norms": sum(norm.weight.numel() == hidden for norm in norms.values()) or 2,
        # a gated norm belongs to a recurrent layer
        "has_head_norms": any(name.endswith("q_norm") for name in norms),
        "fp32_norms": any(type(norm).__name__.startswith(("Gemma", "Qwen3_5RMSNorm")) for norm in norms.values()),
    }


def _state_widths(text: PreTrainedConfig) -> dict[str, int]:
    if not has_state(text):
        return {}
    keys = text.linear_num_key_heads * text.linear_key_head_dim
    values = text.linear_num_value_heads * text.linear_value_head_dim
    share = 1 - num_attention_layers(text) / text.num_hidden_layers
    return {"convolved": int(share * (2 * keys + values)), "gated": int(share * values)}


def _functions(name: str, args: Arguments, text: PreTrainedConfig) -> list[Callable]:
    """Return the functions called `name` from the estimated.py files of the model's extensions."""
    names = active(args.model.own, text).extensions
    modules = [importlib.import_module(f"llava_ds.extensions.{each}.estimated") for each in names]
    return [vars(module)[name] for module in modules if name in vars(module)]


def _add_critic(model: LlavaModel, text: PreTrainedConfig, tower: TowerPlan, args: Arguments) -> None:
    """Add a critic of the actor's size, because flags start it from the actor by default."""
    model.critic = assemble(text, tower, args.model, torch.zeros(3), torch.zeros(3), value_head=True)
    for add in _functions("add", args, text):
        add(model.critic, tower.architecture, text, args.model)
    choose_trainable(model.critic, args)


def _has_llamas_layers(language_model: nn.Module) -> bool:
    layers = (module for module in language_model.modules() if isinstance(module, GradientCheckpointingLayer))
    names = {name.rpartition(".")[0] for layer in layers for name, _ in layer.named_parameters()}
    return names == LLAMAS_LAYER


def _is_tied(language_model: nn.Module) -> bool:
    return language_model.get_output_embeddings().weight is language_model.get_input_embeddings().weight


def _units(model: LlavaModel, elements: dict[nn.Parameter, int]) -> tuple[tuple[int, ...], ...]:
    """Return the tensors that ZeRO-3 gathers together: per repeated layer, and per other module."""
    leaves = tuple(layer_classes(model))
    inside = {id(m) for leaf in model.modules() if isinstance(leaf, leaves) for m in leaf.modules() if m is not leaf}
    sizes = (
        tuple(elements[p] for p in module.parameters(recurse=isinstance(module, leaves)))
        for module in model.modules()
        if id(module) not in inside
    )
    return tuple(unit for unit in sizes if unit)


def _numel(parameters) -> int:
    return sum(p.numel() for p in parameters)
