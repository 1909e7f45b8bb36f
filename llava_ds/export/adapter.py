# T tokens, D language-model width, V vocabulary
"""The export of a LoRA run: a folder that peft and LLaVA open."""

import json
import warnings
from pathlib import Path

import torch
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.initialization import no_init_weights

from llava_ds.config.arguments import ModelArguments
from llava_ds.engine.gather import gathered
from llava_ds.export.llava_config import llava_config
from llava_ds.files.writing import write_file, write_tensors
from llava_ds.geometry import ImageOptions
from llava_ds.model import lora, quantize
from llava_ds.model.hf import TOLERANCE
from llava_ds.model.llava import LlavaModel
from llava_ds.model.loading import load_weights
from llava_ds.model.open import names as formats
from llava_ds.model.plan import ModelPlan
from llava_ds.runtime.ranks import Ranks

# The settings that peft has had since LLaVA's time. Later ones are at what they do when absent: an earlier peft, as
# LLaVA's own code runs with, takes no key that it does not know.
ADAPTER_KEYS = (
    "auto_mapping", "base_model_name_or_path", "bias", "fan_in_fan_out", "inference_mode", "init_lora_weights",
    "layers_pattern", "layers_to_transform", "lora_alpha", "lora_dropout", "modules_to_save", "peft_type", "r",
    "revision", "target_modules", "task_type",
)  # fmt: skip


def export_adapter(
    model: LlavaModel,
    plan: ModelPlan,
    args: ModelArguments,
    image_options: ImageOptions,
    output_dir: Path,
    ranks: Ranks,
) -> list[Path]:
    """Write what LLaVA's LoRA runs leave, in a folder that peft opens over the language model too.

    adapter_config.json and adapter_model.safetensors: LoRA, and the biases that trained with it;
    non_lora_trainables.bin: projector, newline, and the tower if it trained, with LLaVA's keys; config.json with
    LLaVA's fields. Every rank takes part, only rank 0 writes. Returns the paths.
    Source: LLaVA's train.py (get_peft_state_maybe_zero_3 and its non_lora twin).
    """
    named = dict(model.named_parameters())
    adapters = {n: p for n, p in named.items() if n.startswith(formats.LANGUAGE_MODEL) and p.requires_grad}
    towers = {n: p for n, p in named.items() if n.startswith(formats.TOWER) and p.requires_grad}
    others = {n: p for n, p in named.items() if n.startswith((formats.PROJECTOR, formats.NEWLINE))}
    tensors, beside = dict(gathered(adapters.items(), ranks)), dict(gathered({**others, **towers}.items(), ranks))
    if not ranks.is_first:
        return []
    layers = [name for name, _ in lora.lora_layers(model.language_model)]
    return write_adapter(plan, args, image_options, layers, tensors, beside, output_dir)


def write_adapter(
    plan: ModelPlan,
    args: ModelArguments,
    image_options: ImageOptions,
    layers: list[str],
    adapters: dict[str, torch.Tensor],
    beside: dict[str, torch.Tensor],
    output_dir: Path,
) -> list[Path]:
    """Write the folder of export_adapter: adapters, the language model's tensors that trained, and what lies beside
    them, by their names here; layers: full names of those that have LoRA. Returns the paths."""
    config = lora.lora_config(args, layers).to_dict()
    written = {
        **{key: config[key] for key in ADAPTER_KEYS},
        "inference_mode": True,  # as peft writes it: who opens the folder does not train it
        "target_modules": layers,  # peft has them in the order of a set, another in every process
    }
    rest = {
        formats.tower_to_llava(name)
        if name.startswith(formats.TOWER)
        else formats.projector_to_llava(name, args.mm_projector_type): tensor
        for name, tensor in beside.items()
    }
    names = (lora.ADAPTER_CONFIG, lora.ADAPTER_FILES[0], lora.NON_LORA, "config.json")
    paths = [output_dir / name for name in names]
    paths[0].write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")
    tensors = {lora.to_peft(name.removeprefix(formats.LANGUAGE_MODEL)): tensor for name, tensor in adapters.items()}
    write_tensors(paths[1], tensors)
    others = {lora.PEFT_PREFIX + name: tensor for name, tensor in rest.items()}
    write_file(paths[2], lambda file: torch.save(others, file))
    fields = llava_config(plan, args, image_options)
    paths[3].write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
    return paths


@torch.no_grad()
def compare_reloaded_adapter(
    output_dir: Path, plan: ModelPlan, args: ModelArguments, embeds: torch.Tensor, logits: torch.Tensor
) -> float:
    """Open the adapter with peft over a fresh language model, and compare its logits with the trained model's.

    embeds (1, T, D): a single sample with its images' features in their places; logits (T, V) of the trained model,
    within quantize.exact_products. With --bits the fresh model is packed in the same way. Returns the largest
    difference relative to the largest magnitude. Raises RuntimeError when it is above TOLERANCE.
    """
    from peft import PeftModel

    reloaded = _fresh_language_model(plan, args, logits.dtype)
    with warnings.catch_warnings():
        # peft 0.21 asks a model for is_gradient_checkpointing, which transformers 5.23 calls by another name.
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
        reloaded = PeftModel.from_pretrained(reloaded, output_dir).eval()
    with quantize.exact_products(reloaded):
        again = reloaded(inputs_embeds=embeds.cpu()).logits[0]  # (T, V)
    logits = logits.cpu().float()
    difference = ((again.float() - logits).abs().max() / logits.abs().max()).item()
    limit = TOLERANCE[again.dtype]
    if not difference <= limit:
        raise RuntimeError(
            f"{output_dir} was written, but peft computes other logits from it (difference {difference:.2e} of the "
            f"largest, allowed {limit:.0e}): keep the checkpoint and report this"
        )
    return difference


def _fresh_language_model(plan: ModelPlan, args: ModelArguments, dtype: torch.dtype) -> nn.Module:
    """The language model that the run began with, on the CPU, as transformers computes it."""
    config = type(plan.text_config).from_dict(plan.text_config.to_dict())  # without the attention that training chose
    with no_init_weights():
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.tie_weights()
    if args.bits < 16:
        quantize.quantize_layers(model, lora.linear_names(model), args, dtype)
    source, alone = plan.sources.language_model, Ranks(0, 0, 1, torch.device("cpu"))
    load_weights(model, source.open(), alone, source.flag)
    return model
