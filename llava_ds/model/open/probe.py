# T tokens of all samples laid end to end, D language-model width, V vocabulary
"""Test a language model on a small random copy before the model is built.

A list of supported names can't replace this test: families treat position_ids, attention's keyword arguments and a
missing mask differently, and an ignored argument silently changes the result.
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

LENGTHS = (3, 11, 7)  # tokens per sample
WINDOW, CAP = 4, 2.0  # the copy's sliding windows and soft caps, small enough to take effect
DECAY = ".A_log"  # parameter that determines how fast a state decays, exp(A_log) being its rate
BOUND = 2.0  # value for bounds of a tower's activations, if it has any: small enough to take effect
WIDTH, VOCABULARY = 64, 48  # the copy's MLP width and number of tokens
NO_INTERFACE = "its attention or its positions don't follow transformers' interface"
MAX_COPY_BYTES = 2**30  # largest size of the copy; copies of published models take a few megabytes
TOLERANCE = 1e-3  # relative to the largest logit; rounding in fp32 causes 1e-6, a different computation far more


class Findings(NamedTuple):
    """Results of the test of a language model.

    problem: the reason why it can't be trained, or None; whole_last_layer: the reason why its last layer must be
    computed at all positions, or None if it can be computed at supervised positions only.
    """

    problem: str | None
    whole_last_layer: str | None = None


def check_language_model(path: str, config: PreTrainedConfig) -> Findings:
    """Test a language model. Raises ConfigError if it would not be trained correctly."""
    findings = examine(config)
    if findings.problem:
        raise ConfigError(
            f"--model_name_or_path {path} can't be trained here. It is a {config.model_type}: {findings.problem}"
        )
    return findings


def examine(config: PreTrainedConfig) -> Findings:
    """Test a language model on a small copy with random weights.

    The copy's logits for samples laid end to end, with this package's attention, must equal the logits for each sample
    alone with transformers' attention. They must also be the output layer's result for the last hidden states, because
    transformers' Llava does nothing after the output layer. Finally, the last layer is tested at some positions only
    (last_layer.py).
    """
    if problem := _config_problem(config):
        return Findings(problem)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        try:
            with torch.device("meta"):
                size = sum(tensor.nbytes for tensor in _tensors(_build(small_copy(config), "eager")))
            if size > MAX_COPY_BYTES:
                return Findings(f"a small copy to try its attention would take {size / 1e9:,.0f} GB")
            model, reference = random_copy(config), _build(small_copy(config), "eager")
        except Exception as error:  # a family's configuration or constructor may raise anything
            return Findings(f"a small copy to try its attention can't be built ({_first_line(error)})")
        reference.load_state_dict(model.state_dict())
        if problem := _end_problem(model) or _difference(model, reference):
            return Findings(problem)
        return Findings(None, _last_layer_problem(model))


def _config_problem(config: PreTrainedConfig) -> str | None:
    kind = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if kind is None or config.is_encoder_decoder:
        return "it is not a causal language model with a single stack"
    if config.get_text_config() is not config:
        return "it has other parts than a language model"
    if getattr(config, "layerdrop", 0.0):
        return f"it skips random layers, different ones on every rank (layerdrop {config.layerdrop}): set it to 0"
    if getattr(config, "word_embed_proj_dim", config.hidden_size) != config.hidden_size:
        return (
            f"its embeddings are {config.word_embed_proj_dim} wide and its layers {config.hidden_size}, "
            "but an image's features need equal widths"
        )
    if not getattr(kind, "_supports_attention_backend", False):
        return NO_INTERFACE
    return None


def random_copy(config: PreTrainedConfig) -> nn.Module:
    """Build a small copy of a language model with random weights and this package's attention, float32, on the CPU."""
    model = _build(small_copy(config), attention.register())
    draw(model)
    return model


def random_inputs(model: nn.Module) -> dict[str, object]:
    """Return keyword arguments for a copy: three samples laid end to end, on its device."""
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
    """Rebuild a random_copy in another precision. A cast would round the rotary frequencies, too."""
    model = AutoModelForCausalLM.from_config(
        copy.deepcopy(drawn.config), attn_implementation=attention.register(), dtype=dtype
    )
    model.load_state_dict(drawn.state_dict())
    return model.eval()


@torch.no_grad()
def difference_of_a_pack(config: PreTrainedConfig, device: torch.device, dtype: torch.dtype) -> float:
    """Return the largest difference between a small copy's logits for packed and for single samples on a device,
    relative to the largest logit."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = rebuilt(random_copy(config), dtype).to(device)
        inputs = random_inputs(model)
    parts = inputs["inputs_embeds"].split(LENGTHS, 1)
    alone = [model(**_packed(model, part, (part.shape[1],))).logits[0] for part in parts]
    return _distance(model(**inputs).logits[0].float(), torch.cat(alone).float())


def small_copy(config: PreTrainedConfig, twice: bool = False) -> PreTrainedConfig:
    """Reduce a configuration to few heads of unchanged width and one layer of each kind, at least two layers.

    The copy's last layer is the model's last layer. twice: repeat the layers, so that a later layer reads the output of
    every kind of layer at every token; ignored if layers share keys, because their kinds already alternate.
    """
    small, layers = copy.deepcopy(config), layer_configs(config)
    first = layers[0]  # if heads differ, the other layers' configurations override it
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
    key_heads_of = {count: max(1, num_heads * count // heads) for _, count in map(_heads_of, layers) if count}
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
    """Return the head width and the number of key heads in a layer's configuration."""
    return getattr(layer, "head_dim", None), getattr(layer, "num_key_value_heads", None)


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
    """Set all parameters to random numbers that are large enough for every part of a layer to change the logits.
    Buffers that are stored on disk get plausible values."""
    for name, parameter in model.named_parameters():
        if name.endswith(DECAY):
            parameter.normal_(-3, 1)  # with the default, most states would fade before the next sample begins
        elif parameter.ndim > 1:
            parameter.normal_(0, parameter.shape[-1] ** -0.5)
        else:
            parameter.add_(torch.randn_like(parameter) / 4)
    for module in model.modules():
        if getattr(module, "scaling", None) == 1 and hasattr(module, "q_norm"):  # q_norm's weight scales the scores
            module.q_norm.weight.mul_(module.head_dim**-0.5)
    for name, buffer in persistent_buffers(model).items():
        if not buffer.is_floating_point():
            continue
        if name.endswith("_min"):  # bounds of a matrix's inputs and outputs
            buffer.fill_(-BOUND)
        elif name.endswith("_max"):
            buffer.fill_(BOUND)
        else:
            buffer.copy_(1 + torch.randn_like(buffer) / 4)


def _end_problem(model: nn.Module) -> str | None:
    """Return the reason why transformers' Llava can't hold the output layer or modules outside the trunk, or None."""
    if not isinstance(model.base_model, MODEL_MAPPING[type(model.config)]):
        return "transformers' Llava would build a different model from its configuration"
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear) or head.bias is not None or head.in_features != model.config.hidden_size:
        return "its output layer is not a plain matrix like the one in transformers' Llava"
    inside = {id(parameter) for parameter in (*model.base_model.parameters(), head.weight)}
    outside = [name for name, parameter in model.named_parameters() if id(parameter) not in inside]
    if outside:
        return f"transformers' Llava can't hold its {outside[0]}"
    return None


def _difference(model: nn.Module, reference: nn.Module) -> str | None:
    inputs = random_inputs(model)
    embeds = inputs["inputs_embeds"]
    kept = torch.arange(0, sum(LENGTHS), 2)  # every other token
    try:
        logits = model(**inputs, logits_to_keep=kept).logits[0]  # (T / 2, V)
        hidden = model.base_model(**inputs)[0]  # (1, T, D)
        alone = [reference(inputs_embeds=e, use_cache=False).logits[0] for e in embeds.split(LENGTHS, 1)]
    except Exception as error:  # a family may lack such arguments, or not pass them to its attention
        return f"it does not run on samples laid end to end ({_first_line(error)})"
    expected = torch.cat(alone)[kept]
    if logits.shape != expected.shape or _distance(logits, expected) > TOLERANCE:
        return f"its logits for samples laid end to end differ from the logits for each sample alone: {NO_INTERFACE}"
    if _distance(final_logits(model.get_output_embeddings()(hidden[0, kept]), model.config), logits) > TOLERANCE:
        return "it changes the logits after the output layer, and transformers' Llava does not"
    return None


def _last_layer_problem(model: nn.Module) -> str | None:
    """Return the reason why the last layer can't be computed at some positions only, or None.

    Tests few positions of one sample, many of another, and none of a third.
    """
    inputs = random_inputs(model)
    second = LENGTHS[0]
    kept = torch.tensor([0, *range(second + 2, second + LENGTHS[1] - 1)])
    for positions in (kept, kept[[0, -2]]):
        expected = model.base_model(**inputs)[0][0, positions]  # (S, D)
        try:
            last_layer.shorten(model)
            found = model.base_model(**inputs, query_positions=positions)[0][0]
        except Exception as error:  # another kind of layer lacks a part, or has other arguments
            return f"it is not like Llama's: {_first_line(error)}"
        if found.shape != expected.shape or _distance(found, expected) > TOLERANCE:
            return "it is not like Llama's: its output would change"
    return None


def _distance(logits: torch.Tensor, expected: torch.Tensor) -> float:
    difference = (logits - expected).abs().max() / expected.abs().max()
    return difference.item() if difference.isfinite() else float("inf")


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
