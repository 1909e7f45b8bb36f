"""The Architecture interface (extensions/architecture.py) for ready models."""

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from llava_ds.batch import Batch
from llava_ds.config.arguments import Arguments
from llava_ds.config.properties import Feature, clashes, features
from llava_ds.constants import ConfigError
from llava_ds.data.collate import LoadedSample
from llava_ds.export.bit_check import Written
from llava_ds.export.export_plan import ExportPlan
from llava_ds.export.tensors import Entry
from llava_ds.extensions.ready import outer_inputs
from llava_ds.extensions.ready.family import ReadyModel
from llava_ds.extensions.ready.ready_vision import ReadyVision, plan_vision
from llava_ds.extensions.ready.tensor_names import ReadyNames
from llava_ds.files.processor_files import processor_template
from llava_ds.geometry import ImageOptions
from llava_ds.layouts import MediaLayout
from llava_ds.model.families.language import has_state
from llava_ds.model.open.model_plan import ModelPlan
from llava_ds.model.open.tower import read_processor, read_whole_processor
from llava_ds.tokenizer import read_tokenizer

# Flags about composing a LLaVA and its templates. A ready model's files define both, so these flags are refused.
COMPOSING_FLAGS = (
    "vision_tower", "mm_projector_type", "mm_vision_select_layer", "mm_vision_select_feature", "s2", "s2_scales",
    "mm_native_resolution",
    "pretrain_mm_mlp_adapter", "version", "mm_use_im_start_end", "mm_use_im_patch_token", "split_special_tokens",
    "mm_patch_merge_type", "image_aspect_ratio", "image_grid_pinpoints", "fast_image_decoding",
)  # fmt: skip


def ready_problems(args: Arguments, kind: str) -> list[str]:
    """Return a line for every flag that a ready model would ignore, and for every feature not supported with it."""
    given = [name for name in COMPOSING_FLAGS if name in args.given and name != "version"]
    given += ["version"] * ("version" in args.given and args.model.version != "processor")
    problems = expert_problems(args)
    if given:
        problems.append(
            f"{', '.join(f'--{name}' for name in given)}: the files of {kind} define how images and conversations are "
            "prepared: leave them out"
        )
    return problems


def expert_problems(args: Arguments) -> list[str]:
    """Return a line for every feature that puts experts into the model."""
    needs = {"routerless_mlps": "others are untested with it"}
    return clashes([*features(args), Feature("a ready model", needs)])


class ReadyArchitecture(ReadyModel):
    """A family and a configuration. Methods import code lazily that many runs don't need."""

    kind = "a ready model"

    @property
    def casts_pixels(self) -> bool:
        """Return False if the tower needs fp32 pixels, True if they are cast to the weights' precision."""
        return self.family.casts_pixels

    def open_tokenizer(self, path: str, where: str) -> PreTrainedTokenizerBase:
        """Open the tokenizer unchanged, with the processor's chat template. Raises ConfigError if one is missing."""
        tokenizer = read_tokenizer(path, where)
        if not tokenizer.is_fast:
            raise ConfigError(
                f"{where}: the tokenizer is a slow one, without character offsets: add its tokenizer.json"
            )
        template = processor_template(path, where) or tokenizer.chat_template
        if isinstance(template, dict):  # several templates, by name
            template = template.get("default")
        if not isinstance(template, str):
            raise ConfigError(
                f"{where} has no chat template (chat_template.jinja, chat_template.json or in processor_config.json): "
                "a base model without one can't be trained on conversations, use the instruction-tuned one"
            )
        tokenizer.chat_template = template
        tokenizer.name_or_path = str(path)
        tokenizer._is_as_llava = True  # so that no other code changes it
        return tokenizer

    def plan_tower(self, folder: Path, tokenizer: PreTrainedTokenizerBase, where: str) -> ReadyVision:
        """Return the plan of vision model, connector and image processing from the folder's processor files."""
        return plan_vision(self, read_processor(folder, where), read_whole_processor(folder, where), tokenizer, where)

    def problems(self, args: Arguments, kind: str) -> list[str]:
        """Return a line for every flag that conflicts with the model."""
        return ready_problems(args, kind)

    def expert_problems(self, args: Arguments) -> list[str]:
        """Return a line for every feature that puts experts into the model."""
        return expert_problems(args)

    def try_out(self, plan: ModelPlan, images: ImageOptions, cache_dir: str) -> str:
        """Compare a small random copy with transformers' class, and return a line with the result."""
        from llava_ds.extensions.ready.ready_trial import check_ready

        return check_ready(plan, images, cache_dir)

    def layer_notes(self, text_config: PreTrainedConfig, device: torch.device, dtype: torch.dtype) -> list[str]:
        """Return lines about layers with a recurrent state (Gated DeltaNet)."""
        if not has_state(text_config):
            return []
        from llava_ds.extensions.ready.delta_net import delta_net_report

        return [delta_net_report(text_config, device, dtype)]

    def names(self, text_config: PreTrainedConfig) -> ReadyNames:
        """Return the mapping of tensor names."""
        return ReadyNames(self, text_config)

    def entries(self, export: ExportPlan, entries: list[Entry]) -> list[Entry]:
        """Return the tensors under their names in the source folder."""
        from llava_ds.extensions.ready.exported_folder import ready_entries

        return ready_entries(export, entries)

    def write(self, export: ExportPlan, entries: list[Entry], output_dir: Path, holes: bool) -> Written:
        """Write the exported folder, and return checksums. holes: write weight files without weights."""
        from llava_ds.extensions.ready.exported_folder import write_ready

        return write_ready(export, entries, output_dir, holes=holes)

    def write_changed_settings(self, export: ExportPlan, output_dir: Path) -> None:
        """Write the processor's files if the run prepared images differently from the source's files."""
        from llava_ds.extensions.ready.exported_folder import write_image_sizes

        write_image_sizes(export, output_dir)

    def saved_modules(self, names: Sequence[str]) -> list[str]:
        """Return modules_to_save for peft: connectors and the tower, or its parts if it contains a connector.

        peft can't save a list of modules, only each of its entries.
        """
        found, family = {}, self.family
        for name in names:
            place = next((path for path in family.connector if name.startswith(f"{path}.")), family.vision)
            parts = name.removeprefix(f"{place}.").split(".")
            if parts[0].isdigit():  # an entry in a list of connectors
                place = f"{place}.{parts[0]}"
            elif place == family.vision and any(path.startswith(f"{place}.") for path in family.connector):
                place = f"{place}.{'.'.join(parts[: 2 if parts[1].isdigit() else 1])}"
            found[place] = None
        return list(found)

    def first_inputs(
        self,
        model: PreTrainedModel,
        batch: Batch,
        layouts: list[MediaLayout],
        pixels: torch.Tensor,
        num_positions: int,
    ) -> dict[str, torch.Tensor]:
        """Return arguments of transformers' class for the first positions of a sample."""
        return outer_inputs.first_inputs(self.family, model, batch, layouts, pixels, num_positions)

    def prompt_inputs(
        self, model: PreTrainedModel, samples: list[LoadedSample], batch: Batch, pixels: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """Return arguments of generate()."""
        return outer_inputs.prompt_inputs(self.family, model, samples, batch, pixels)
