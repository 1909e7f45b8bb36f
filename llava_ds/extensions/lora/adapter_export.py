# T tokens, D language-model width, V vocabulary; I, O widths of a linear layer, R rank
"""Write a LoRA adapter folder for peft and LLaVA, and merge LoRA into the weights of a complete model."""

import contextlib
import json
import math
import warnings
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path

import torch
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.initialization import no_init_weights

from llava_ds.batch import Batch
from llava_ds.config.arguments import ModelArguments, trained_parts
from llava_ds.engine.placement import gathered
from llava_ds.export.bit_check import Written, sums_of
from llava_ds.export.export_plan import ExportPlan
from llava_ds.export.layer_by_layer import Deadline, layer_by_layer
from llava_ds.export.llava_folder import llava_config
from llava_ds.export.output_folder import planned_entries
from llava_ds.export.reload_check import check_room, compare_logits
from llava_ds.export.safetensors_shards import num_bytes
from llava_ds.export.tensors import Entry, write_own_files
from llava_ds.export.tokenizer_files import write_variables
from llava_ds.extensions.lora import layers as lora
from llava_ds.extensions.lora import quantize
from llava_ds.extensions.lora.expert_layers import UNTRUE
from llava_ds.extensions.lora.layers import own
from llava_ds.extensions.lora.merged_adapters import merged_weight
from llava_ds.files.model_files import BESIDE_ADAPTER
from llava_ds.files.writing import write_file, write_tensors
from llava_ds.model.llava import LlavaModel, merge_features
from llava_ds.model.open import names as formats
from llava_ds.model.open.loading import load_weights
from llava_ds.model.open.model_folder import without_prefix
from llava_ds.model.open.weights import Overlaid, Source
from llava_ds.model.projector import Newline
from llava_ds.runtime.ranks import Ranks

# Settings of the peft version that LLaVA uses. It refuses unknown keys, so newer settings are written only if they
# differ from their defaults.
ADAPTER_KEYS = (
    "auto_mapping", "base_model_name_or_path", "bias", "fan_in_fan_out", "inference_mode", "init_lora_weights",
    "layers_pattern", "layers_to_transform", "lora_alpha", "lora_dropout", "modules_to_save", "peft_type", "r",
    "revision", "target_modules", "task_type",
)  # fmt: skip
PROJECTOR = ("projector.", formats.NEWLINE)


def layout_of(export: ExportPlan) -> lora.LoraLayout:
    """Return the LoRA layout of a model to be exported."""
    return export.model.own["lora"]


def export_adapter(export: ExportPlan, model: LlavaModel, output_dir: Path, ranks: Ranks) -> Written:
    """Write the adapter of a model in training.

    Collective: only rank 0 writes and returns checksums of the tensors' bits; other ranks return an empty dict.
    """
    layout, named = layout_of(export), dict(model.named_parameters())
    adapters = {n: p for n, p in named.items() if p.requires_grad and layout.holds(n)}
    towers = {n: p for n, p in named.items() if n.startswith(formats.TOWER) and p.requires_grad and n not in adapters}
    others = {n: p for n, p in named.items() if n.startswith(PROJECTOR) and not lora.is_lora(n)}
    head = {n: p for n, p in named.items() if n.startswith(formats.VALUE_HEAD)}
    heads = dict(gathered(head.items(), ranks))
    tensors, beside = dict(gathered(adapters.items(), ranks)), dict(gathered({**others, **towers}.items(), ranks))
    if ranks.is_first:
        beside = {lora.plain_name(name): _before(name, tensor, export, model) for name, tensor in beside.items()}
        written = write_adapter(export, tensors, lora.start_of(model), beside, output_dir)
        return written | write_own_files(heads, output_dir)
    return {}


def _before(name: str, weight: torch.Tensor, export: ExportPlan, model: LlavaModel) -> torch.Tensor:
    """Return a weight stored outside the adapter, with LoRA's initial product added back if it was subtracted."""
    scales = {target.name: target.scale(export.args) for target in layout_of(export).targets}
    layer = name.removesuffix(".base_layer.weight")
    if layer + lora.A not in lora.start_of(model):
        return weight
    a, b = (lora.start_of(model)[layer + half] for half in (lora.A, lora.B))
    return merged_weight(weight, [(a, b, scales[layer])])


def write_restored_adapter(
    export: ExportPlan,
    trained: list[Entry],
    start: dict[str, torch.Tensor],
    base: Iterable[Entry],
    output_dir: Path,
) -> Written:
    """Write the adapter of a checkpoint, and return checksums of the tensors' bits.

    trained: the checkpoint's entries. start: LoRA's initial matrices, if they were subtracted from the weights. base:
    entries of the run's initial model.
    """
    by_name = {entry.name: entry for entry in base if entry.name.startswith(PROJECTOR)}
    by_name |= {entry.name: entry for entry in trained}
    layout, parts = layout_of(export), trained_parts(export.args)
    adapters = [entry.name for entry in trained if layout.holds(entry.name)]
    beside = [name for name in by_name if name.startswith(PROJECTOR) and not lora.is_lora(name)]
    beside += [name for name in by_name if name.startswith(formats.TOWER) and "vision_tower" in parts]

    def read(names: Iterable[str]) -> dict[str, torch.Tensor]:
        return {name: by_name[name].read().to(export.dtype).contiguous() for name in names}

    plain = {lora.plain_name(name): tensor for name, tensor in read(beside).items()}
    written = write_adapter(export, read(adapters), start, plain, output_dir)
    head = read(name for name in by_name if name.startswith(formats.VALUE_HEAD))
    return written | write_own_files(head, output_dir)


def write_adapter(
    export: ExportPlan,
    adapters: dict[str, torch.Tensor],
    start: dict[str, torch.Tensor],
    beside: dict[str, torch.Tensor],
    output_dir: Path,
) -> Written:
    """Write an adapter folder like LLaVA's LoRA runs, readable by peft. Returns checksums of the tensors' bits.

    adapter_model.safetensors holds LoRA, the biases trained with it, and --modules_to_save. non_lora_trainables.bin
    holds the projector, newline, and a fully trained tower under LLaVA's keys. An extension's architecture gets peft's
    files for transformers' class of the complete model, with fully trained parts in modules_to_save. adapters, beside:
    tensors for adapter_model.safetensors and for non_lora_trainables.bin, by name in the model. start: LoRA's initial
    matrices, if they were subtracted from the weights; the adapter is then converted to fit the original weights.
    Source: LLaVA's train.py (get_peft_state_maybe_zero_3 and its non_lora twin).
    """
    layout, architecture = layout_of(export), export.model.architecture
    tensors = lora.over_unchanged_weights(adapters, start)
    saved = [layout.of_module(module) for module in layout.saved]
    if architecture is not None:
        parts = tuple(part for part in ("projector", "vision_tower") if part in trained_parts(export.args))
        whole = {name: tensor for name, tensor in beside.items() if parts and name.startswith(parts)}
        tensors |= whole
        saved += architecture.saved_modules([layout.rename(name) for name in whole])
        architecture.write_changed_settings(export, output_dir)
    written = {lora.to_peft(layout.rename(name)): tensor.contiguous() for name, tensor in tensors.items()}
    file = output_dir / lora.ADAPTER_FILES[0]
    write_tensors(file, written)
    sums: Written = {file: sums_of(written.items())}
    _write_config(export, saved, doubles=bool(start), output_dir=output_dir)
    if export.uses_own_template:
        write_variables(export.model.tokenizer, output_dir)
    if architecture is None:
        others = {lora.PEFT_PREFIX + layout.rename(name): tensor for name, tensor in beside.items()}
        write_file(output_dir / BESIDE_ADAPTER, lambda file: torch.save(others, file))
        sums[output_dir / BESIDE_ADAPTER] = sums_of(others.items())
        (output_dir / "config.json").write_text(json.dumps(llava_config(export), indent=2) + "\n", encoding="utf-8")
    return sums


def _write_config(export: ExportPlan, saved: list[str], doubles: bool, output_dir: Path) -> None:
    """Write adapter_config.json.

    saved: modules stored in full in the adapter's file. doubles: True if the stored LoRA matrices have twice the
    trained rank, at the same scale.
    """
    args = export.args
    more, bigger = (2, math.sqrt(2) if own(args).use_rslora else 2) if doubles else (1, 1)
    patterns = {
        "rank_pattern": {key: rank * more for key, rank in lora.patterns_of(own(args).lora_rank_pattern).items()},
        "alpha_pattern": {key: alpha * bigger for key, alpha in lora.patterns_of(own(args).lora_alpha_pattern).items()},
    }
    targets = [target.outer for target in layout_of(export).targets if not target.is_stacked]
    stacked = [target.outer for target in layout_of(export).targets if target.is_stacked]
    config = lora.peft_config(args, targets, own(args).lora_r * more, own(args).lora_alpha * bigger).to_dict()
    written = {
        **{key: config[key] for key in ADAPTER_KEYS},
        "inference_mode": True,  # like peft: an exported adapter is not for training
        "target_modules": targets,  # peft writes a set, in a different order in every process
        "modules_to_save": saved or None,
        **({"target_parameters": stacked} if stacked else {}),
        **{key: config[key] for key in ("use_rslora", "use_dora") if config[key]},
        **{key: value for key, value in patterns.items() if value},
    }
    if doubles:
        written["init_lora_weights"] = True  # otherwise peft would subtract the initial product from the weights again
    (output_dir / lora.ADAPTER_CONFIG).write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")


@torch.no_grad()
def compare_reloaded_adapter(output_dir: Path, export: ExportPlan, batch: Batch, logits: torch.Tensor) -> float:
    """Open the adapter with peft over the initial model, and compare its logits with the trained model's.

    Projector and tower come from the file in the adapter's folder. batch: a single sample; logits (T, V): from the
    trained model, at all or the first few positions, computed within quantize.exact_products. With --bits, the initial
    model is quantized, too. Returns and raises like compare_logits; raises NotCompared if time or memory runs out.
    """
    from peft import PeftModel

    deadline = Deadline()
    check_room(num_bytes(planned_entries(export), logits.dtype) * own(export.args).bits // 16)
    reloaded = _fresh_language_model(export, logits.dtype)
    eyes = _fresh_vision(output_dir, export, logits.dtype)
    for name, outer in eyes.modules_in_files.items():
        attach(reloaded, outer, eyes.get_submodule(name))
    with warnings.catch_warnings():
        # peft 0.21 reads a model's is_gradient_checkpointing, renamed in transformers 5.23.
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
        warnings.filterwarnings("ignore", UNTRUE, RuntimeWarning)
        reloaded = PeftModel.from_pretrained(reloaded, output_dir).eval()
    for name, outer in eyes.adapted.items():
        eyes.set_submodule(name, reloaded.get_base_model().get_submodule(outer))
    embeds = eyes.embed(reloaded.get_input_embeddings(), batch.to("cpu"))
    where = logits if own(export.args).bits == 16 else logits.cpu()  # quantized weights don't move layer by layer
    with quantize.exact_products(reloaded), layer_by_layer(reloaded, where, deadline) as device:
        again = reloaded(inputs_embeds=embeds[:, : len(logits)].to(device)).logits[0]  # (T, V)
    return compare_logits(output_dir, "peft", again, logits)


@torch.no_grad()
def hold_packed(export: ExportPlan, base: nn.Module, deadline: Deadline) -> None:
    """Quantize the weights that --bits packs, and store them dequantized in `base`, a model of transformers' class.

    The weights are no longer mapped from their files, but in memory. Raises NotCompared if time or memory runs out.
    """
    with torch.device("meta"):
        language_model = AutoModelForCausalLM.from_config(export.model.text_config)
    names = [layout_of(export).of_module(formats.LANGUAGE_MODEL + n) for n in lora.linear_names(language_model)]
    weights = [base.get_submodule(name).weight for name in names]
    check_room(sum(weight.nbytes for weight in weights))
    for done, weight in enumerate(weights):
        deadline.check(done, len(weights), weight.device)
        weight.copy_(quantize.quantize_and_back(weight.detach(), own(export.args)))


@contextlib.contextmanager
def built_in(dtype: torch.dtype) -> Iterator[None]:
    """Set torch's default dtype inside the context, so that modules are built in it."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class _FreshVision(nn.Module):
    """Tower and projector at the start of a run.

    adapted: maps names of modules with LoRA or in --modules_to_save to their names in peft's files. modules_in_files:
    the same for all modules with parameters.
    """

    def __init__(self, export: ExportPlan) -> None:
        super().__init__()
        layout, tower = layout_of(export), export.model.tower
        names = [target.name for target in layout.targets] + list(layout.saved)
        self.adapted = {n: layout.of_module(n) for n in names if not n.startswith(formats.LANGUAGE_MODEL)}
        self.modules_in_files: dict[str, str] = {}
        mean, std = (torch.tensor(values) for values in (tower.images.mean, tower.images.std))
        self.vision_tower = tower.build(mean, std)
        self.projector = tower.build_projector(export.args, export.model.hidden_size)
        self.newline = Newline(export.model.hidden_size) if "unpad" in export.args.mm_patch_merge_type else None
        if self.adapted:
            for part in (formats.TOWER, formats.PROJECTOR):
                inner = self.get_submodule(part.rstrip("."))
                own = [name for name, module in inner.named_modules() if name and list(module.parameters(False))]
                self.modules_in_files |= {part + name: layout.of_module(part + name) for name in own}
            self.modules_in_files |= self.adapted

    def embed(self, embedding: nn.Module, batch: Batch) -> torch.Tensor:
        """Return the batch's input embeddings, with image features placed as in LlavaModel."""
        features = self.projector(self.vision_tower(batch.pixel_values, batch.tower))
        return merge_features(embedding(batch.input_ids), features, batch.placing, self.newline)[0]


def _fresh_vision(output_dir: Path, export: ExportPlan, dtype: torch.dtype) -> _FreshVision:
    """Load tower and projector on the CPU: weights from the adapter's folder, others from the initial model."""
    with no_init_weights(), built_in(dtype):
        eyes = _FreshVision(export)
    alone, beside, flag = Ranks(0, 0, 1, torch.device("cpu")), str(output_dir / BESIDE_ADAPTER), "--output_dir"
    tower = export.model.sources.vision_tower
    trained = Source(flag, beside, without_prefix(formats.tower_from_llava)).open()
    whole = tower.open(export.model.tower.runs)
    load_weights(eyes.vision_tower, Overlaid(whole, trained) if trained.shapes else whole, alone, tower.flag)
    for part, rename in (("projector", formats.projector_from_llava), ("newline", formats.newline_from_llava)):
        if (module := getattr(eyes, part)) is not None:
            load_weights(module, Source(flag, beside, rename).open(), alone, flag)
    return eyes.eval()


def attach(root: nn.Module, name: str, module: nn.Module) -> None:
    """Attach a module under a dotted name, creating empty modules for missing parents."""
    *parents, last = name.split(".")
    for parent in parents:
        if not hasattr(root, parent):
            root.add_module(parent, nn.Module())
        root = getattr(root, parent)
    root.add_module(last, module)


def _fresh_language_model(export: ExportPlan, dtype: torch.dtype) -> nn.Module:
    """Load the run's initial language model on the CPU, with transformers' attention."""
    plan, args = export.model, export.args
    config = type(plan.text_config).from_dict(plan.text_config.to_dict())  # without training's attention
    with no_init_weights():
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.tie_weights()
    if own(args).bits < 16:
        quantize.quantize_layers(model, lora.linear_names(model), own(args), dtype)
    source, alone = plan.sources.language_model, Ranks(0, 0, 1, torch.device("cpu"))
    load_weights(model, source.open(), alone, source.flag)
    return model


def merged_entries(
    trained: Iterable[Entry],
    base: Iterable[Entry],
    args: ModelArguments,
    layout: lora.LoraLayout,
    start: dict[str, torch.Tensor] | None = None,
) -> list[Entry]:
    """Return the entries of the complete model with LoRA merged: computed in float32 and rounded once.

    trained: a checkpoint's entries. base: entries of the run's initial model. start: LoRA's initial matrices, if they
    were subtracted from the weights. With --bits, LoRA is added to the dequantized weights, because it was trained with
    them.
    """
    by_name = {entry.name: entry for entry in trained}
    plain = {lora.plain_name(name): entry for name, entry in by_name.items() if not lora.is_lora(name)}
    targets = {target.weight: target for target in layout.targets}
    merged = []
    for entry in base:
        target = targets.get(entry.name)
        if target is not None:
            halves = {half: by_name.get(target.halves + half) for half in (lora.A, lora.B, lora.MAGNITUDE)}
            a, b = (target.halves + half for half in (lora.A, lora.B))
            began = [] if not start else [(start[a], start[b], -target.scale(args))]
            read = partial(_merged, entry, halves, target.scale(args), began, args)
            merged.append(Entry(entry.name, entry.shape, read))
        else:
            own = plain.get(entry.name, entry)
            merged.append(Entry(entry.name, own.shape, own.read))
    return merged


def _merged(
    weight: Entry,
    halves: dict[str, Entry | None],
    scale: float,
    began: list[tuple[torch.Tensor, torch.Tensor, float]],
    args: ModelArguments,
) -> torch.Tensor:
    """Merge A, B and optional magnitudes into W, in W's precision. began: initial A, B and scale to subtract."""
    base = weight.read()
    packed = own(args).bits < 16 and weight.name.startswith(formats.LANGUAGE_MODEL)
    held = quantize.quantize_and_back(base, own(args)) if packed else base
    a, b, magnitude = (halves[half] and halves[half].read() for half in (lora.A, lora.B, lora.MAGNITUDE))
    return merged_weight(held, [(a, b, scale), *began], magnitude).to(base.dtype)
