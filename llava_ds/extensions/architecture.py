"""The interface of models that an extension reads, instead of the core composing them from parts."""

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    from llava_ds.batch import Batch
    from llava_ds.config.arguments import Arguments, ModelArguments
    from llava_ds.data.collate import LoadedSample
    from llava_ds.export.bit_check import Written
    from llava_ds.export.export_plan import ExportPlan
    from llava_ds.export.tensors import Entry
    from llava_ds.geometry import ImageOptions
    from llava_ds.layouts import MediaLayout
    from llava_ds.model.open.model_folder import ModelFolder
    from llava_ds.model.open.model_plan import ModelPlan
    from llava_ds.model.open.weights import Weights
    from llava_ds.model.vision import TowerPlan


class TensorNames(Protocol):
    """Maps an architecture's tensor names to this project's names for tower, projector and language model."""

    def from_part(self, name: str) -> str:
        """Return the name in transformers' class for a name in this project."""

    def to_memory(self, on_disk: str) -> str | None:
        """Return the name in transformers' class for a name on disk; None if the class lacks the tensor."""


class Architecture(Protocol):
    """A model of one of transformers' classes, trained with its own tower, connector, template and processor.

    kind: the model's description in messages; config: the complete model's configuration; casts_pixels: False if the
    tower takes fp32 pixels even if its weights have another dtype.
    """

    kind: str
    config: "PreTrainedConfig"
    casts_pixels: bool

    def outer_class(self) -> "type[PreTrainedModel]":
        """Return transformers' class."""

    def open_tokenizer(self, path: str, where: str) -> "PreTrainedTokenizerBase":
        """Open the tokenizer of a folder. where: beginning of messages. Raises ConfigError."""

    def plan_tower(self, folder: Path, tokenizer: "PreTrainedTokenizerBase", where: str) -> "TowerPlan":
        """Plan the tower from the processor's files in a folder. Raises ConfigError."""

    def problems(self, args: "Arguments", kind: str) -> list[str]:
        """Return a line for every flag that conflicts with the model. kind: its description in messages."""

    def expert_problems(self, args: "Arguments") -> list[str]:
        """Return a line for every feature that puts experts into the model, by flags or by the DeepSpeed JSON."""

    def try_out(self, plan: "ModelPlan", images: "ImageOptions", cache_dir: str) -> str:
        """Compare a small copy of the model with transformers' class. Returns a line to print. Raises ConfigError if
        they differ."""

    def layer_notes(self, text_config: "PreTrainedConfig", device: "torch.device", dtype: "torch.dtype") -> list[str]:
        """Return lines on how layers compute a pack on a device. Raises ConfigError if they would mix samples."""

    def names(self, text_config: "PreTrainedConfig") -> TensorNames:
        """Return the mapping of its tensor names."""

    def entries(self, export: "ExportPlan", entries: "list[Entry]") -> "list[Entry]":
        """Return the tensors to write, by their names on disk."""

    def write(self, export: "ExportPlan", entries: "list[Entry]", output_dir: Path, holes: bool) -> "Written":
        """Write the folder, like transformers_folder.write_hf."""

    def write_changed_settings(self, export: "ExportPlan", output_dir: Path) -> None:
        """Write the processor's files for an adapter, if the run's settings differ from those of its base."""

    def saved_modules(self, names: Sequence[str]) -> list[str]:
        """Return the fewest modules of transformers' class that contain these tower and connector tensors."""

    def first_inputs(
        self,
        model: "PreTrainedModel",
        batch: "Batch",
        layouts: "list[MediaLayout]",
        pixels: "torch.Tensor",
        num_positions: int,
    ) -> "dict[str, torch.Tensor]":
        """Return arguments of transformers' class for the first positions of a sample, given its images' layouts.

        pixels (N, 3, S, S), normalised. Raises NotCompared if they can't be computed.
        """

    def prompt_inputs(
        self, model: "PreTrainedModel", samples: "list[LoadedSample]", batch: "Batch", pixels: "torch.Tensor"
    ) -> "dict[str, torch.Tensor]":
        """Return arguments of generate() for prompts, (B, T), padded on the left. batch: the batch of all prompts."""


class FolderPart(Protocol):
    """Reads an extension's model folders. model_types: supported values of model_type in config.json."""

    model_types: Collection[str] = ()

    def read(self, path: str, config: dict, where: str) -> "ModelFolder":
        """Read a folder with one of Trigger.model_types. config: its config.json; where: beginning of messages.
        Raises ConfigError, with the reason if model_types lacks the folder's model_type.
        """

    def missing(self, config: dict) -> list[str]:
        """Return the required parts that a config.json lacks."""

    def architecture(self, config: "PreTrainedConfig") -> Architecture:
        """Return the architecture of a configuration with one of model_types."""


class TextPart:
    """The changes that an extension makes to language models of Trigger.text_types or text_fields. Default: none.

    config: the language model's configuration.
    """

    def breaks(self, config: "PreTrainedConfig") -> Collection[str]:
        """Return the keys of PROPERTIES that are false for such a model."""
        return ()

    def from_disk(self, name: str, config: "PreTrainedConfig", known: Collection[str] | None = None) -> str | None:
        """Map a tensor's name in a folder to its name in memory, or to an input name of stacked(). None if the name is
        unknown. known: all names in memory."""
        return name if known is None or name in known else None

    def stacked(self, weights: "Weights", config: "PreTrainedConfig") -> "Weights":
        """Convert weights with names from from_disk to their form in memory."""
        return weights

    def on_disk(self, entries: "list[Entry]", config: "PreTrainedConfig") -> "list[Entry]":
        """Convert a complete model's tensors, of all its parts, to their form in a folder."""
        return entries

    def assembled(self, language_model: "nn.Module", config: "PreTrainedConfig", args: "ModelArguments") -> None:
        """Change a model that transformers' class built, before it has weights."""

    def used_per_token(self, language_model: "nn.Module", config: "PreTrainedConfig", dense: int) -> float:
        """Return the number of matrix weights used per token. dense: weights of all linear layers but the output."""
        return dense

    def in_transformers(self, config: "PreTrainedConfig") -> "tuple[PreTrainedConfig | None, str]":
        """Return the configuration of an equivalent transformers model, and ""; if there is none, None and why."""
        return config, ""

    def name_in_transformers(self, name: str, config: "PreTrainedConfig") -> str:
        """Map a language-model tensor's name to its name on disk in the format of in_transformers()."""
        return name

    def differs(self, config: "PreTrainedConfig", dtype: "torch.dtype") -> str:
        """Return why transformers may give other logits than training; "" if they are the same."""
        return ""

    def llava_class(self, model_type: str, architecture: str, config: "PreTrainedConfig") -> tuple[str, str]:
        """Return model_type and architecture for config.json in LLaVA's format, given the plain model's."""
        return model_type, architecture
