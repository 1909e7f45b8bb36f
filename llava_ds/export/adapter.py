# T tokens, D language-model width, V vocabulary; I, O widths of a linear layer, R rank
"""LoRA: the adapter's folder, which peft and LLaVA open, and the weights with LoRA merged into them."""

import json
import warnings
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import torch
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.initialization import no_init_weights

from llava_ds.config.arguments import ModelArguments, trained_parts
from llava_ds.engine.gather import gathered
from llava_ds.export.export_plan import ExportPlan
from llava_ds.export.layer_by_layer import Deadline, layer_by_layer
from llava_ds.export.llava_folder import llava_config
from llava_ds.export.output_folder import planned_entries
from llava_ds.export.ready_folder import write_image_sizes
from llava_ds.export.reload_check import check_room, compare_logits
from llava_ds.export.safetensors_shards import num_bytes
from llava_ds.export.tensors import Entry, write_value_head
from llava_ds.files.writing import write_file, write_tensors
from llava_ds.model import lora, quantize
from llava_ds.model.families.ready_family import ReadyFamily
from llava_ds.model.llava import LlavaModel
from llava_ds.model.loading import load_weights
from llava_ds.model.open import names as formats
from llava_ds.model.open.ready_folder import ReadyNames
from llava_ds.runtime.ranks import Ranks

# The settings that peft has had since LLaVA's time. Later ones have their defaults when absent: an earlier peft, as
# LLaVA's own code runs with, refuses unknown keys.
ADAPTER_KEYS = (
    "auto_mapping", "base_model_name_or_path", "bias", "fan_in_fan_out", "inference_mode", "init_lora_weights",
    "layers_pattern", "layers_to_transform", "lora_alpha", "lora_dropout", "modules_to_save", "peft_type", "r",
    "revision", "target_modules", "task_type",
)  # fmt: skip
PROJECTOR = ("projector.", formats.NEWLINE)
_A, _B = (f".lora_{half}.{lora.ADAPTER}.weight" for half in "AB")


def export_adapter(export: ExportPlan, model: LlavaModel, output_dir: Path, ranks: Ranks) -> None:
    """Write the adapter of a model that is being trained. Every rank takes part, only rank 0 writes."""
    named = dict(model.named_parameters())
    adapters = {n: p for n, p in named.items() if n.startswith(formats.LANGUAGE_MODEL) and p.requires_grad}
    towers = {n: p for n, p in named.items() if n.startswith(formats.TOWER) and p.requires_grad}
    others = {n: p for n, p in named.items() if n.startswith(PROJECTOR)}
    head = {n: p for n, p in named.items() if n.startswith(formats.VALUE_HEAD)}
    heads = dict(gathered(head.items(), ranks))
    tensors, beside = dict(gathered(adapters.items(), ranks)), dict(gathered({**others, **towers}.items(), ranks))
    if ranks.is_first:
        layers = [name for name, _ in lora.lora_layers(model.language_model)]
        write_adapter(export, layers, tensors, beside, output_dir)
        write_value_head(heads, output_dir)


def write_restored_adapter(export: ExportPlan, trained: list[Entry], base: Iterable[Entry], output_dir: Path) -> None:
    """Write the adapter of a checkpoint. trained: its entries; base: for a projector that was frozen."""
    by_name = {entry.name: entry for entry in base if entry.name.startswith(PROJECTOR)}
    by_name |= {entry.name: entry for entry in trained}
    tower = (formats.TOWER,) if "vision_tower" in trained_parts(export.args) else ()

    def read(prefixes: str | tuple[str, ...]) -> dict[str, torch.Tensor]:
        entries = [entry for name, entry in by_name.items() if name.startswith(prefixes)]
        return {entry.name: entry.read().to(export.dtype).contiguous() for entry in entries}

    adapters = read(formats.LANGUAGE_MODEL)
    layers = [name.removeprefix(formats.LANGUAGE_MODEL).removesuffix(_A) for name in adapters if name.endswith(_A)]
    write_adapter(export, layers, adapters, read(PROJECTOR + tower), output_dir)
    write_value_head(read(formats.VALUE_HEAD), output_dir)


def write_adapter(
    export: ExportPlan,
    layers: list[str],
    adapters: dict[str, torch.Tensor],
    beside: dict[str, torch.Tensor],
    output_dir: Path,
) -> None:
    """Write the folder of LLaVA's LoRA runs, which peft opens over the language model, too.

    adapter_config.json and adapter_model.safetensors: LoRA, and the biases that trained with it;
    non_lora_trainables.bin: projector, newline, and the tower if it trained, with LLaVA's keys; config.json with
    LLaVA's fields. layers: full names of those that have LoRA; adapters, beside: the tensors of the first two files and
    of the third by their names in the model.
    Source: LLaVA's train.py (get_peft_state_maybe_zero_3 and its non_lora twin).
    """
    if export.model.ready is not None:
        _write_ready_adapter(export, layers, {**adapters, **beside}, output_dir)
        return
    _write_config(export, layers, output_dir)
    rest = {
        formats.tower_to_llava(name)
        if name.startswith(formats.TOWER)
        else formats.projector_to_llava(name, export.args.mm_projector_type): tensor
        for name, tensor in beside.items()
    }
    tensors = {lora.to_peft(name.removeprefix(formats.LANGUAGE_MODEL)): tensor for name, tensor in adapters.items()}
    write_tensors(output_dir / lora.ADAPTER_FILES[0], tensors)
    others = {lora.PEFT_PREFIX + name: tensor for name, tensor in rest.items()}
    write_file(output_dir / lora.NON_LORA, lambda file: torch.save(others, file))
    (output_dir / "config.json").write_text(json.dumps(llava_config(export), indent=2) + "\n", encoding="utf-8")


def _write_config(export: ExportPlan, layers: list[str], output_dir: Path, saved: list[str] | None = None) -> None:
    """Write adapter_config.json. saved: names of modules whose weights are in the adapter's file as a whole."""
    config = lora.lora_config(export.args, layers).to_dict()
    written = {
        **{key: config[key] for key in ADAPTER_KEYS},
        "inference_mode": True,  # as peft writes it: who opens the folder does not train it
        "target_modules": layers,  # peft has them in the order of a set, another in every process
        "modules_to_save": saved,
    }
    (output_dir / lora.ADAPTER_CONFIG).write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")


def _write_ready_adapter(
    export: ExportPlan, layers: list[str], tensors: dict[str, torch.Tensor], output_dir: Path
) -> None:
    """Write peft's folder over transformers' class of the whole model. What trained beside LoRA is among its
    modules_to_save."""
    ready = export.model.ready
    names = ReadyNames(ready, export.model.text_config)
    saved = tuple(part for part in ("projector", "vision_tower") if part in trained_parts(export.args))
    outer = [names.from_part(f"{formats.LANGUAGE_MODEL}{layer}") for layer in layers]
    kept = {name: t for name, t in tensors.items() if name.startswith((formats.LANGUAGE_MODEL, *saved))}
    whole = [names.from_part(name) for name in kept if name.startswith(saved)] if saved else []
    _write_config(export, outer, output_dir, _saved_modules(ready.family, whole) or None)
    written = {lora.to_peft(names.from_part(name)): tensor for name, tensor in kept.items()}
    write_tensors(output_dir / lora.ADAPTER_FILES[0], written)
    write_image_sizes(export, output_dir)


def _saved_modules(family: ReadyFamily, names: list[str]) -> list[str]:
    """The modules of these tensors, as few as there are: connectors and the tower, or the tower's parts where it has a
    connector in it. peft takes no list of modules, but each of them."""
    found = {}
    for name in names:
        place = next((path for path in family.connector if name.startswith(f"{path}.")), family.vision)
        parts = name.removeprefix(f"{place}.").split(".")
        if parts[0].isdigit():  # of a list of connectors
            place = f"{place}.{parts[0]}"
        elif place == family.vision and any(path.startswith(f"{place}.") for path in family.connector):
            place = f"{place}.{'.'.join(parts[: 2 if parts[1].isdigit() else 1])}"
        found[place] = None
    return list(found)


@torch.no_grad()
def compare_reloaded_adapter(output_dir: Path, export: ExportPlan, embeds: torch.Tensor, logits: torch.Tensor) -> float:
    """Open the adapter with peft over a fresh language model, and compare its logits with the trained model's.

    embeds (1, T, D): a single sample with its images' features in their places; logits (T, V) of the trained model at
    its positions or the first ones, within quantize.exact_products. With --bits the fresh model is quantized in the
    same way. Returns and raises as compare_logits does. Raises NotCompared where time or memory end first.
    """
    from peft import PeftModel

    deadline = Deadline()
    check_room(num_bytes(planned_entries(export), logits.dtype) * export.args.bits // 16)
    reloaded = _fresh_language_model(export, logits.dtype)
    with warnings.catch_warnings():
        # peft 0.21 asks a model for is_gradient_checkpointing, which transformers 5.23 calls by another name.
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
        reloaded = PeftModel.from_pretrained(reloaded, output_dir).eval()
    where = logits if export.args.bits == 16 else logits.cpu()  # quantized weights don't move layer by layer
    with quantize.exact_products(reloaded), layer_by_layer(reloaded, where, deadline) as device:
        again = reloaded(inputs_embeds=embeds[:, : len(logits)].to(device)).logits[0]  # (T, V)
    return compare_logits(output_dir, "peft", again, logits)


def _fresh_language_model(export: ExportPlan, dtype: torch.dtype) -> nn.Module:
    """Load the language model that the run began with, on the CPU, as transformers computes it."""
    plan, args = export.model, export.args
    config = type(plan.text_config).from_dict(plan.text_config.to_dict())  # without the attention that training chose
    with no_init_weights():
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.tie_weights()
    if args.bits < 16:
        quantize.quantize_layers(model, lora.linear_names(model), args, dtype)
    source, alone = plan.sources.language_model, Ranks(0, 0, 1, torch.device("cpu"))
    load_weights(model, source.open(), alone, source.flag)
    return model


def merged_entries(trained: Iterable[Entry], base: Iterable[Entry], args: ModelArguments) -> list[Entry]:
    """The whole model without LoRA: every weight W + scale * B A, added in float32 and rounded once.

    trained: a checkpoint's entries; base: the model that the run began with. With --bits, LoRA is added to the
    dequantized weights, beside which it was trained.
    """
    by_name = {entry.name: entry for entry in trained}
    plain = {lora.plain_name(name): entry for name, entry in by_name.items() if not lora.is_lora(name)}
    merged = []
    for entry in base:
        layer = entry.name.removesuffix(".weight")
        if layer + _A in by_name:
            read = partial(_merged, entry, by_name[layer + _A], by_name[layer + _B], args)
            merged.append(Entry(entry.name, entry.shape, read))
        else:
            own = plain.get(entry.name, entry)
            merged.append(Entry(entry.name, own.shape, own.read))
    return merged


def _merged(weight: Entry, a: Entry, b: Entry, args: ModelArguments) -> torch.Tensor:
    """Merge entries of W (O, I), A (R, I) and B (O, R), in W's precision."""
    base = weight.read()
    held = base if args.bits == 16 else quantize.quantize_and_back(base, args)
    scale = args.lora_alpha / args.lora_r
    return torch.addmm(held.float(), b.read().float(), a.read().float(), alpha=scale).to(base.dtype)
