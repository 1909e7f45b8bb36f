# T tokens of all samples laid end to end, D width of the language model, V vocabulary
"""Trial of a language model on a small random copy, before the large one is built.

No list of names can replace it: families differ in their use of position_ids, of attention's keyword arguments and of a
missing mask, and what they ignore changes the maths silently.
"""

import copy
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING, AutoModelForCausalLM, PreTrainedConfig

from llava_ds.constants import ConfigError
from llava_ds.model import attention, last_layer
from llava_ds.model.families.language import MLP_WIDTHS, final_logits, has_state, layer_configs
from llava_ds.model.open.loading import persistent_buffers

LENGTHS = (3, 11, 7)  # of the samples
WINDOW, CAP = 4, 2.0  # sliding windows and soft caps of the copy: so small that they matter
DECAY = ".A_log"  # a parameter by which a state fades: exp(-exp(A_log)) a token and less
BOUND = 2.0  # of numbers in a tower that has bounds: so small that they matter
WIDTH, VOCABULARY = 64, 48  # of its MLPs, and its tokens
NO_INTERFACE = "its attention or its positions don't follow transformers' interface"
MAX_COPY_BYTES = 2**30  # of the copy; those of published models take some megabytes
TOLERANCE = 1e-3  # of the largest logit; in fp32 the same maths differ by 1e-6, others by far more


class Findings(NamedTuple):
    """problem: why a language model can't be trained; None if it can.

    whole_last_layer: why its last layer has to be computed at all positions; None if supervised ones are enough.
    """

    problem: str | None
    whole_last_layer: str | None = None


def check_language_model(path: str, config: PreTrainedConfig) -> Findings:
    """Raise ConfigError for a language model that would not be trained correctly."""
    findings = examine(config)
    if findings.problem:
        raise ConfigError(
            f"--model_name_or_path {path} is of the kind {config.model_type}, which can't be trained here: "
            f"{findings.problem}"
        )
    return findings


def examine(config: PreTrainedConfig) -> Findings:
    """Try a language model on a small copy.

    A small copy with random weights has to give the same logits for samples laid end to end, with this package's
    attention, as for each alone, with transformers' own. Its logits have to be the output layer's result for the last
    hidden states, because transformers' Llava has nothing after it. The last layer is tried at some positions only,
    with last_layer.py.
    """
    if problem := _config_problem(config):
        return Findings(problem)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        try:
            with torch.device("meta"):
                size = sum(tensor.nbytes for tensor in _tensors(_build(small_copy(config), "eager")))
            if size > MAX_COPY_BYTES:
                return Findings(f"a small copy of it, to try its attention, would take {size / 1e9:,.0f} GB")
            model, reference = random_copy(config), _build(small_copy(config), "eager")
        except Exception as error:  # any error of a family's configuration or constructor
            return Findings(f"no small copy of it can be built to try its attention ({_first_line(error)})")
        reference.load_state_dict(model.state_dict())
        if problem := _end_problem(model) or _difference(model, reference):
            return Findings(problem)
        return Findings(None, _last_layer_problem(model))


def _config_problem(config: PreTrainedConfig) -> str | None:
    kind = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if kind is None or config.is_encoder_decoder:
        return "it is no language model of one causal stack"
    if config.get_text_config() is not config:
        return "it has other parts than a language model"
    if getattr(config, "layerdrop", 0.0):
        return f"it leaves out layers at random (layerdrop {config.layerdrop}), other ones on every rank: set it to 0"
    if getattr(config, "word_embed_proj_dim", config.hidden_size) != config.hidden_size:
        return (
            f"its embeddings are {config.word_embed_proj_dim} wide and its layers {config.hidden_size}, "
            "but an image's features are as wide as both"
        )
    if not getattr(kind, "_supports_attention_backend", False):
        return NO_INTERFACE
    return None


def random_copy(config: PreTrainedConfig) -> nn.Module:
    """A small copy of a language model with random weights and this package's attention, float32, on the CPU."""
    model = _build(small_copy(config), attention.register())
    draw(model)
    return model


def random_inputs(model: nn.Module) -> dict[str, object]:
    """A copy's keyword arguments for three samples laid end to end, on its device."""
    embedding = model.get_input_embeddings()
    ids = torch.randint(0, VOCABULARY, (1, sum(LENGTHS)))
    embeds = embedding(ids.to(embedding.weight.device)).detach()  # (1, T, D)
    return _packed(model, embeds, LENGTHS)


def _packed(model: nn.Module, embeds: torch.Tensor, lengths: tuple[int, ...]) -> dict[str, object]:
    return {
        "inputs_embeds": embeds,
        "position_ids": torch.cat([torch.arange(n) for n in lengths])[None].to(embeds.device),
        "cu_seqlens": torch.tensor((0, *lengths)).cumsum(0).int().to(embeds.device),
        "max_seqlen": max(lengths),
        "use_cache": False,
        **({"lengths": lengths} if has_state(model.config) else {}),
    }


def rebuilt(drawn: nn.Module, dtype: torch.dtype) -> nn.Module:
    """A random_copy in another precision, built anew: a cast would round rotary frequencies, too."""
    model = AutoModelForCausalLM.from_config(
        copy.deepcopy(drawn.config), attn_implementation=attention.register(), dtype=dtype
    )
    model.load_state_dict(drawn.state_dict())
    return model.eval()


@torch.no_grad()
def difference_of_a_pack(config: PreTrainedConfig, device: torch.device, dtype: torch.dtype) -> float:
    """The difference of a small copy's logits on a device, packed and one by one, relative to the largest."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = rebuilt(random_copy(config), dtype).to(device)
        inputs = random_inputs(model)
    parts = inputs["inputs_embeds"].split(LENGTHS, 1)
    alone = [model(**_packed(model, part, (part.shape[1],))).logits[0] for part in parts]
    return _distance(model(**inputs).logits[0].float(), torch.cat(alone).float())


def small_copy(config: PreTrainedConfig, twice: bool = False) -> PreTrainedConfig:
    """The configuration with few heads of unchanged width, and one layer of each kind, at least two.

    Its last layer is the model's last one. twice: with all of them once more before, so that another layer reads what
    each kind makes of every token; not where layers share keys, whose kinds follow each other anyway.
    """
    small, layers = copy.deepcopy(config), layer_configs(config)
    first = layers[0]  # where heads differ, other layers say how they do
    heads, key_heads = config.num_attention_heads, getattr(first, "num_key_value_heads", None)
    own_width = getattr(first, "head_dim", None)
    num_heads = 4 if heads > 1 else 1
    other_widths = (name for name in vars(first) if name.endswith("_intermediate_size"))
    changes = {
        "num_attention_heads": num_heads,
        "hidden_size": num_heads * (own_width or config.hidden_size // heads),
        "vocab_size": VOCABULARY,
        "vocab_size_per_layer_input": VOCABULARY,
        "sliding_window": WINDOW,
        "attention_chunk_size": WINDOW,
        "attn_logit_softcapping": CAP,
        "final_logit_softcapping": CAP,
        "pad_token_id": 0,
        "bos_token_id": 0,
        "eos_token_id": 0,
        **dict.fromkeys((*MLP_WIDTHS, *other_widths), WIDTH),
    }
    key_heads_of = {count: max(1, num_heads * count // heads) for count in _key_heads(layers)}
    if key_heads is not None:
        changes["num_key_value_heads"] = key_heads_of[key_heads]
    if state_heads := getattr(config, "linear_num_key_heads", None):
        times = max(1, config.linear_num_value_heads // state_heads)
        changes |= {"linear_num_key_heads": 2, "linear_num_value_heads": 2 * times}
    changes["word_embed_proj_dim"] = changes["hidden_size"]
    for name, value in changes.items():
        if getattr(first, name, None) is not None:
            setattr(small, name, value)

    depth, shared = config.num_hidden_layers, getattr(config, "num_kv_shared_layers", None) or 0
    per_layer = {name: v for name, v in vars(config).items() if isinstance(v, (list, tuple)) and len(v) == depth}
    shares = [i >= depth - shared for i in range(depth)]
    kinds = list(zip(*per_layer.values(), shares, map(_heads_of, layers)))
    chosen = sorted({depth - 1 - kinds[::-1].index(kind) for kind in kinds})
    if len(chosen) < 2:
        chosen = list(range(min(2, depth)))
    chosen *= 2 if twice and not shared else 1
    small.num_hidden_layers = len(chosen)
    for name, values in per_layer.items():
        setattr(small, name, [values[i] for i in chosen])
    if shared:
        small.num_kv_shared_layers = sum(shares[i] for i in chosen)
    if len(set(map(_heads_of, layers))) > 1:
        small.per_layer_config = {
            i: {"head_dim": layers[of].head_dim, "num_key_value_heads": key_heads_of[layers[of].num_key_value_heads]}
            for i, of in enumerate(chosen)
        }
    return small


def _heads_of(layer: PreTrainedConfig) -> tuple[int | None, int | None]:
    """The width of a layer's heads and its number of key heads, as its configuration has them."""
    return getattr(layer, "head_dim", None), getattr(layer, "num_key_value_heads", None)


def _key_heads(layers: list[PreTrainedConfig]) -> set[int]:
    return {count for _, count in map(_heads_of, layers) if count is not None}


def _build(config: PreTrainedConfig, attention_name: str) -> nn.Module:
    model = AutoModelForCausalLM.from_config(
        copy.deepcopy(config), attn_implementation=attention_name, dtype=torch.float32
    )
    return model.eval()


def _tensors(model: nn.Module) -> Iterator[torch.Tensor]:
    yield from model.parameters()
    yield from model.buffers()


@torch.no_grad()
def draw(model: nn.Module) -> None:
    """Give all parameters random numbers so large that every part of a layer changes the logits, and buffers that are
    on disk such numbers as they have there."""
    for name, parameter in model.named_parameters():
        if name.endswith(DECAY):
            parameter.normal_(-3, 1)  # as initialised, most states would be gone before the next sample begins
        elif parameter.ndim > 1:
            parameter.normal_(0, parameter.shape[-1] ** -0.5)
        else:
            parameter.add_(torch.randn_like(parameter) / 4)
    for module in model.modules():
        if getattr(module, "scaling", None) == 1 and hasattr(module, "q_norm"):  # the scale of scores is in its weight
            module.q_norm.weight.mul_(module.head_dim**-0.5)
    for name, buffer in persistent_buffers(model).items():
        if not buffer.is_floating_point():
            continue
        if name.endswith("_min"):  # bounds of what goes into a matrix and comes out of it
            buffer.fill_(-BOUND)
        elif name.endswith("_max"):
            buffer.fill_(BOUND)
        else:
            buffer.copy_(1 + torch.randn_like(buffer) / 4)


def _end_problem(model: nn.Module) -> str | None:
    """The problem with what is outside the layers and has no place in transformers' Llava; None without one."""
    if not isinstance(model.base_model, MODEL_MAPPING[type(model.config)]):
        return "transformers' Llava would build another model from its configuration"
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear) or head.bias is not None or head.in_features != model.config.hidden_size:
        return "its output layer is not the mere matrix that transformers' Llava has there"
    inside = {id(parameter) for parameter in (*model.base_model.parameters(), head.weight)}
    outside = [name for name, parameter in model.named_parameters() if id(parameter) not in inside]
    if outside:
        return f"transformers' Llava has no place for its {outside[0]}"
    return None


def _difference(model: nn.Module, reference: nn.Module) -> str | None:
    inputs = random_inputs(model)
    embeds = inputs["inputs_embeds"]
    kept = torch.arange(0, sum(LENGTHS), 2)  # every other token
    try:
        logits = model(**inputs, logits_to_keep=kept).logits[0]  # (T / 2, V)
        hidden = model.base_model(**inputs)[0]  # (1, T, D)
        alone = [reference(inputs_embeds=e, use_cache=False).logits[0] for e in embeds.split(LENGTHS, 1)]
    except Exception as error:  # a family may not have such arguments, or not pass them on to its attention
        return f"it does not run on samples laid end to end ({_first_line(error)})"
    expected = torch.cat(alone)[kept]
    if logits.shape != expected.shape or _distance(logits, expected) > TOLERANCE:
        return f"its logits for samples laid end to end are not those of each by itself: {NO_INTERFACE}"
    if _distance(final_logits(model.get_output_embeddings()(hidden[0, kept]), model.config), logits) > TOLERANCE:
        return "its logits are changed after the output layer in a way that transformers' Llava does not have"
    return None


def _last_layer_problem(model: nn.Module) -> str | None:
    """Reason against the last layer at some positions only: few of one sample, many of another, none of one."""
    inputs = random_inputs(model)
    second = LENGTHS[0]
    kept = torch.tensor([0, *range(second + 2, second + LENGTHS[1] - 1)])
    for positions in (kept, kept[[0, -2]]):
        expected = model.base_model(**inputs)[0][0, positions]  # (S, D)
        try:
            last_layer.shorten(model)
            found = model.base_model(**inputs, query_positions=positions)[0][0]
        except Exception as error:  # another kind of layer lacks a part, or has other arguments
            return f"it is not of the kind of Llama's: {_first_line(error)}"
        if found.shape != expected.shape or _distance(found, expected) > TOLERANCE:
            return "it is not of the kind of Llama's: its output would be another"
    return None


def _distance(logits: torch.Tensor, expected: torch.Tensor) -> float:
    difference = (logits - expected).abs().max() / expected.abs().max()
    return difference.item() if difference.isfinite() else float("inf")


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
