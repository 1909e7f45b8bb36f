# T tokens, D language-model width, V vocabulary
"""What a LoRA run leaves: a folder that peft and LLaVA open. And the weights with LoRA merged into them."""

import json
import warnings
from collections.abc import Iterator
from pathlib import Path

import deepspeed
import torch
from safetensors.torch import save_file
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from llava_ds import formats
from llava_ds.arguments import ModelArguments
from llava_ds.checkpoint.export import TOLERANCE
from llava_ds.checkpoint.gather import gathered
from llava_ds.checkpoint.llava_config import llava_config
from llava_ds.distributed import Ranks
from llava_ds.geometry import PictureOptions
from llava_ds.model import lora, quantize
from llava_ds.model.build import ModelPlan
from llava_ds.model.llava import LlavaModel

LANGUAGE_MODEL = "language_model."


def merged_tensors(model: nn.Module, ranks: Ranks) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor on CPU) on rank 0, nothing elsewhere, as gathered(model.named_parameters(), ranks) gives them, but
    with LoRA merged: every name is the one without LoRA, every weight W + scale * B A, added in float32 and rounded
    once to the precision that is trained in.

    Packed weights (--bits) are what the run computed with, not what they were packed from. A model without LoRA gives
    its parameters as they are. Every rank has to run through it; one layer is whole at a time.
    """
    with_lora = dict(lora.lora_layers(model))
    for name, parameter in model.named_parameters():
        plain = lora.plain_name(name)
        if plain is None:
            continue
        owner, is_base, _ = name.rpartition(".base_layer.weight")
        if is_base and owner in with_lora:
            tensor = _merged_weight(with_lora[owner], ranks)
            if ranks.is_first:
                yield plain, tensor
        else:
            for _, tensor in gathered([(name, parameter)], ranks):
                yield plain, tensor


@torch.no_grad()
def _merged_weight(layer: nn.Module, ranks: Ranks) -> torch.Tensor | None:
    """On rank 0, on the CPU."""
    adapter = [layer.lora_A[lora.ADAPTER].weight, layer.lora_B[lora.ADAPTER].weight]
    whole = [p for p in (layer.base_layer.weight, *adapter) if hasattr(p, "ds_id")]
    with deepspeed.zero.GatheredParameters(whole, enabled=bool(whole)):
        if not ranks.is_first:
            return None
        weight = quantize.unpacked(layer.base_layer).float() + lora.delta(layer)
        return weight.to("cpu", adapter[0].dtype)


def export_adapter(
    model: LlavaModel, plan: ModelPlan, args: ModelArguments, pictures: PictureOptions, output_dir: Path, ranks: Ranks
) -> list[Path]:
    """Write what LLaVA's LoRA runs leave, in a folder that peft opens over the language model too.

    adapter_config.json and adapter_model.safetensors: LoRA, and the biases that trained with it;
    non_lora_trainables.bin: projector, newline, and the tower if it trained, with LLaVA's keys; config.json with
    LLaVA's fields. Every rank takes part, only rank 0 writes. Returns the paths.
    Source: LLaVA's train.py (get_peft_state_maybe_zero_3 and its non_lora twin).
    """
    named = dict(model.named_parameters())
    adapters = {n: p for n, p in named.items() if n.startswith(LANGUAGE_MODEL) and p.requires_grad}
    towers = {n: p for n, p in named.items() if n.startswith(formats.TOWER) and p.requires_grad}
    others = {n: p for n, p in named.items() if n.startswith((formats.PROJECTOR, formats.NEWLINE))}
    tensors = {lora.to_peft(n.removeprefix(LANGUAGE_MODEL)): t for n, t in gathered(adapters.items(), ranks)}
    rest = {
        formats.projector_to_llava(name, args.mm_projector_type): tensor
        for name, tensor in gathered(others.items(), ranks)
    } | {formats.tower_to_llava(name): tensor for name, tensor in gathered(towers.items(), ranks)}
    names = (lora.ADAPTER_CONFIG, lora.ADAPTER_FILES[0], lora.NON_LORA, "config.json")
    paths = [output_dir / name for name in names]
    if ranks.is_first:
        layers = [name for name, _ in lora.lora_layers(model.language_model)]
        config = lora.lora_config(args, layers)
        config.inference_mode = True  # as peft writes it: who opens the folder does not train it
        config.save_pretrained(output_dir)
        written = json.loads(paths[0].read_text(encoding="utf-8"))
        written["target_modules"] = layers  # peft has them in the order of a set, another in every process
        paths[0].write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")
        save_file(tensors, paths[1], metadata={"format": "pt"})
        torch.save({lora.PEFT_PREFIX + name: tensor for name, tensor in rest.items()}, paths[2])
        fields = llava_config(plan, args, pictures)
        paths[3].write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
    return paths


@torch.no_grad()
def compare_reloaded_adapter(
    output_dir: Path, args: ModelArguments, embeds: torch.Tensor, logits: torch.Tensor
) -> float:
    """Open the adapter with peft over the language model's own folder, and compare its logits with the trained model's.

    embeds (1, T, D): a single sample with its pictures' features in their places; logits (T, V) of the trained model,
    within quantize.exact_products. With --bits the base is packed in the same way. Returns the largest difference
    relative to the largest magnitude. Raises RuntimeError when it is above TOLERANCE.
    """
    from peft import PeftModel

    base = AutoModelForCausalLM.from_pretrained(
        args.model_name_or_path,
        dtype=logits.dtype,
        local_files_only=True,
        quantization_config=_bits_and_bytes(args, logits.dtype),
    )
    with warnings.catch_warnings():
        # peft 0.21 asks a model for is_gradient_checkpointing, which transformers 5.23 calls by another name.
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
        reloaded = PeftModel.from_pretrained(base, output_dir).eval()
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


def _bits_and_bytes(args: ModelArguments, dtype: torch.dtype) -> BitsAndBytesConfig | None:
    if args.bits == 16:
        return None
    return BitsAndBytesConfig(
        load_in_4bit=args.bits == 4,
        load_in_8bit=args.bits == 8,
        bnb_4bit_quant_type=args.quant_type,
        bnb_4bit_use_double_quant=args.double_quant,
        bnb_4bit_compute_dtype=dtype,
        llm_int8_threshold=quantize.OUTLIERS,
    )
