"""Convert upcycled models to transformers' own mixtures: Llama to Mixtral, Qwen 3 to Qwen3-MoE.

Both choose the k largest probabilities of a softmax over all experts and scale them to the sum 1, like DeepSpeed's gate
for k >= 2. Neither combines experts with an MLP. Mixtral has experts in every layer.
"""

from transformers import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from llava_ds.extensions.mixtures.experts import to_disk
from llava_ds.extensions.mixtures.kinds import EXPERTS, UPCYCLED, is_upcycled
from llava_ds.extensions.mixtures.upcycled import GATE, Mixture, expert_of

# Dense family: the mixture with the same attention.
FAMILIES = {"llama": "mixtral", "mistral": "mixtral", "qwen3": "qwen3_moe"}
_WORDS = ("gate_proj", "up_proj", "down_proj")
_OWN = ("model_type", "architectures", "transformers_version", "auto_map", UPCYCLED)


def native_config(config: PreTrainedConfig) -> tuple[PreTrainedConfig | None, str]:
    """Return the configuration of the same model in a transformers family and "", or None and the reason."""
    family, mixture = FAMILIES.get(config.model_type), Mixture.of(config)
    dense = [layer for layer in range(config.num_hidden_layers) if layer not in mixture.layers]
    has_biases = getattr(config, "attention_bias", False) or getattr(config, "mlp_bias", False)
    for is_other, why in (
        (family is None, f"a {config.model_type} with experts"),
        (mixture.use_residual, "experts added to an MLP (--use_residual)"),
        (mixture.top_k == 1, "one expert per token, scaled by its probability (--top_k_experts 1)"),
        (family == "mixtral" and bool(dense), f"a {config.model_type} with experts in only some of its layers"),
        (has_biases, "experts with biases"),
        (getattr(config, "use_sliding_window", False), "experts and an attention window in some layers"),
    ):
        if is_other:
            return None, f"transformers has no class for {why}"
    known = set(CONFIG_MAPPING[family]().to_dict()) - set(_OWN) | {"head_dim"}
    fields = {key: value for key, value in config.to_dict().items() if key in known}
    fields["num_experts_per_tok"] = mixture.top_k
    if family == "mixtral":
        fields |= {"num_local_experts": mixture.num_experts, "sliding_window": getattr(config, "sliding_window", None)}
    else:
        fields |= {
            "num_experts": mixture.num_experts,
            "moe_intermediate_size": config.intermediate_size,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": dense,
        }
    return CONFIG_MAPPING[family].from_dict(fields), ""


def converted(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return the exported configuration: of transformers' own mixture if one fits, else unchanged."""
    return config if not is_upcycled(config) else native_config(config)[0] or config


def native_name(name: str, config: PreTrainedConfig) -> str:
    """Map a tensor's name in an upcycled model to its name on disk in the exported family."""
    family = converted(config)
    if not is_upcycled(config) or family is config:
        return name
    names = EXPERTS[family.model_type]
    if name.endswith(f".mlp.{GATE}"):
        return to_disk(name.replace(GATE, "gate.weight"), names)
    if (parts := expert_of(name)) is None:
        return name
    block, number, rest = parts
    word = dict(zip(_WORDS, names.matrices))[rest.split(".")[1]]
    return to_disk(f"{block.partition('deepspeed_moe.')[0]}experts.{number}.{word}.weight", names)
