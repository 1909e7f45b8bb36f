"""Add LoRA to the layers once the weights are loaded, quantized with --bits, and export it as an adapter."""

from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

import deepspeed
import torch
from torch import nn
from transformers import PreTrainedConfig

from llava_ds.batch import Batch
from llava_ds.config.arguments import ModelArguments
from llava_ds.constants import ConfigError
from llava_ds.engine.construct import Build
from llava_ds.export.bit_check import Written
from llava_ds.export.export_plan import ExportPlan
from llava_ds.export.layer_by_layer import Deadline
from llava_ds.export.tensors import Entry
from llava_ds.extensions.architecture import Architecture
from llava_ds.extensions.base import Adapter, Extension, StatePart, Wrap
from llava_ds.extensions.lora import layers
from llava_ds.extensions.lora.adapter_reader import open_adapter
from llava_ds.extensions.lora.expert_layers import experts_per_token
from llava_ds.extensions.lora.flags import changes_base
from llava_ds.extensions.lora.layers import START_FILE, own
from llava_ds.files.model_files import adapter_file, is_adapter
from llava_ds.model.llava import LlavaModel, layer_classes
from llava_ds.model.open.folder import read_folder
from llava_ds.model.open.loading import load_weights
from llava_ds.model.open.model_folder import FLAG
from llava_ds.model.open.model_plan import ModelPlan
from llava_ds.model.open.weights import WeightFiles
from llava_ds.runtime.ranks import Ranks


class Lora(Wrap):
    """Adds packed weights and LoRA to the model, and chooses the trained parameters."""

    def check(self, args: ModelArguments) -> None:
        layers.check_lora(args)
        path = args.model_name_or_path
        if own(args).lora_enable and path is not None and is_adapter(path):
            base = read_folder(path, args.model_base).base
            raise ConfigError(
                f"--lora_enable True over {FLAG} {path}, but that is a LoRA adapter itself, and no program opens an "
                f"adapter of an adapter. Continue training it with --lora_weight_path {path} over {FLAG} {base}, or "
                "merge it with run/export.py first"
            )

    def planned(self, plan: ModelPlan, model: LlavaModel, args: ModelArguments) -> ModelPlan:
        if not own(args).lora_enable:
            return plan
        layout = layers.lora_layout(model, args, plan.architecture, plan.text_config)
        only = "grouped_mm" if any(target.is_stacked for target in layout.targets) else None
        return replace(plan, own={**plan.own, "lora": layout}, only_products=only)

    def weights_per_token(
        self, model: LlavaModel, architecture: Architecture | None, text: PreTrainedConfig, args: ModelArguments
    ) -> dict[str, int]:
        found: dict[str, int] = {}
        targets = layers.lora_layout(model, args, architecture, text).targets if own(args).lora_enable else ()
        for target in targets:
            part, times = target.name.partition(".")[0], experts_per_token(text) if target.is_stacked else 1
            *_, rows, columns = model.get_parameter(target.weight).shape
            found[part] = found.get(part, 0) + target.rank * (rows + columns) * times
        return found

    def assembled(self, model: LlavaModel, build: Build) -> None:
        if own(build.args).packs:
            from llava_ds.extensions.lora.quantize import move_unpacked, quantize_layers  # imports bitsandbytes

            llm = model.language_model
            quantize_layers(llm, layers.linear_names(llm), own(build.args), build.dtype)
            move_unpacked(model, build.ranks.device)

    def filled(self, model: LlavaModel, build: Build) -> None:
        args, plan = build.args, build.plan
        flags = own(args)
        if not flags.lora_enable:
            return
        start = None if plan.checkpoint is None or not changes_base(flags) else layers.read_start(plan.checkpoint)
        layout = plan.own["lora"]
        layers.add_lora(model, layout, args, build.seed, start)
        if flags.lora_weight_path is not None:
            file = adapter_file(flags.lora_weight_path)
            named = dict(model.named_parameters())
            weights = WeightFiles(file, layers.names_from_peft(model, named))
            # For an extension's architecture, this file also holds the connector and tower if they were trained.
            beside = weights.shapes if plan.architecture is not None else ()
            trained = {n: p for n, p in named.items() if (p.requires_grad and layout.holds(n)) or n in beside}
            load_weights(trained, weights, build.ranks, "--lora_weight_path")
        if flags.use_dora and build.is_partitioned:
            _gather_as_one(model)

    def trains(self, model: LlavaModel, args: ModelArguments) -> None:
        if own(args).lora_enable:
            layers.choose_adapters(model, own(args).lora_bias)


def _gather_as_one(model: LlavaModel) -> None:
    """Make ZeRO-3 gather all parameters of a DoRA layer at once, unless an enclosing layer is gathered as a whole.

    DoRA's submodules also read the base weight of another module.
    """
    leaves = tuple(layer_classes(model))
    inside = {id(m) for leaf in model.modules() if isinstance(leaf, leaves) for m in leaf.modules()}
    for _, layer in layers.lora_layers(model):
        if id(layer) not in inside:
            deepspeed.utils.set_z3_leaf_module(layer, True)


class Export(Adapter):
    """Writes the adapter folder of LLaVA's LoRA runs, readable by peft (adapter_export.py)."""

    def write(self, export: ExportPlan, model: LlavaModel, folder: Path, ranks: Ranks) -> Written:
        from llava_ds.extensions.lora.adapter_export import export_adapter

        return export_adapter(export, model, folder, ranks)

    def exact(self, model: LlavaModel) -> AbstractContextManager:
        from llava_ds.extensions.lora.quantize import exact_products

        return exact_products(model)

    def compare(self, folder: Path, export: ExportPlan, batch: Batch, logits: torch.Tensor) -> float:
        from llava_ds.extensions.lora.adapter_export import compare_reloaded_adapter

        return compare_reloaded_adapter(folder, export, batch, logits)

    def hold(self, export: ExportPlan, base: nn.Module, deadline: Deadline) -> None:
        if own(export.args).packs:
            from llava_ds.extensions.lora.adapter_export import hold_packed

            hold_packed(export, base, deadline)

    def merged(self, trained: list[Entry], base: list[Entry], export: ExportPlan, checkpoint: Path) -> list[Entry]:
        from llava_ds.extensions.lora.adapter_export import merged_entries

        start = _start(export, checkpoint)
        return merged_entries(trained, base, export.args, export.model.own["lora"], start)

    def write_restored(
        self, export: ExportPlan, trained: list[Entry], base: list[Entry], checkpoint: Path, folder: Path
    ) -> Written:
        from llava_ds.extensions.lora.adapter_export import write_restored_adapter

        return write_restored_adapter(export, trained, _start(export, checkpoint), base, folder)


def _start(export: ExportPlan, checkpoint: Path) -> dict[str, torch.Tensor]:
    """Return LoRA's initial matrices from a checkpoint's run, if they were subtracted from the weights."""
    return layers.read_start(checkpoint) if changes_base(own(export.args)) else {}


extension = Extension(
    wrap=Lora(),
    adapter=Export(),
    state=StatePart(START_FILE, layers.start_of),
    open_folder=open_adapter,
)
