"""Models that an extension reads and the core does not compose itself: what the core asks of them."""

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    from llava_ds.batch import Batch
    from llava_ds.config.arguments import Arguments
    from llava_ds.data.collate import LoadedSample
    from llava_ds.export.bit_check import Written
    from llava_ds.export.export_plan import ExportPlan
    from llava_ds.export.tensors import Entry
    from llava_ds.geometry import ImageOptions
    from llava_ds.layouts import MediaLayout
    from llava_ds.model.open.folder import ModelFolder
    from llava_ds.model.open.model_plan import ModelPlan
    from llava_ds.model.vision import TowerPlan


class TensorNames(Protocol):
    """Names of an architecture's tensors. Here they are those of tower, projector and language model."""

    def from_part(self, name: str) -> str:
        """Return the name in transformers' class of a tensor here."""

    def to_memory(self, on_disk: str) -> str | None:
        """Return the name in transformers' class of a tensor in a folder; None for what the class does not have."""


class Architecture(Protocol):
    """A model of one class of transformers', which is trained with its own tower, connector, template and processor.

    kind: what it is, as messages say it; config: of the whole model; casts_pixels: False if its tower takes pixels in
    fp32, whatever its weights are in.
    """

    kind: str
    config: "PreTrainedConfig"
    casts_pixels: bool

    def outer_class(self) -> "type[PreTrainedModel]":
        """Return transformers' class."""

    def open_tokenizer(self, path: str, where: str) -> "PreTrainedTokenizerBase":
        """Open the tokenizer of a folder. where: as messages begin. Raises ConfigError."""

    def plan_tower(self, folder: Path, tokenizer: "PreTrainedTokenizerBase", where: str) -> "TowerPlan":
        """Plan the tower from the processor's files in a folder. Raises ConfigError."""

    def problems(self, args: "Arguments", kind: str) -> list[str]:
        """Return lines on flags that don't go with the model. kind: what it is, as a message says it."""

    def sharing_problems(self, args: "Arguments") -> list[str]:
        """Return those on ranks that share parts of the model, which the DeepSpeed JSON may ask for, too."""

    def try_out(self, plan: "ModelPlan", images: "ImageOptions", cache_dir: str) -> str:
        """Compare a small copy with transformers' class. Returns a line. Raises ConfigError where they differ."""

    def layer_notes(self, text_config: "PreTrainedConfig", device: "torch.device", dtype: "torch.dtype") -> list[str]:
        """Return lines on how layers compute a pack on a device. Raises ConfigError where they mix samples."""

    def names(self, text_config: "PreTrainedConfig") -> TensorNames:
        """Return the names of its tensors."""

    def entries(self, export: "ExportPlan", entries: "list[Entry]") -> "list[Entry]":
        """Return the tensors to write by their names on disk."""

    def write(self, export: "ExportPlan", entries: "list[Entry]", output_dir: Path, holes: bool) -> "Written":
        """Write the folder, as transformers_folder.write_hf does."""

    def write_changed_settings(self, export: "ExportPlan", output_dir: Path) -> None:
        """Write the processor's files beside an adapter, where the run's settings are not those of its base."""

    def saved_modules(self, names: Sequence[str]) -> list[str]:
        """Return the fewest modules of transformers' class that hold these tensors of tower and connector."""

    def first_inputs(
        self,
        model: "PreTrainedModel",
        batch: "Batch",
        layouts: "list[MediaLayout]",
        pixels: "torch.Tensor",
        num_positions: int,
    ) -> "dict[str, torch.Tensor]":
        """Return arguments of transformers' class for the first positions of a sample, with the layouts of its images.

        pixels (N, 3, S, S), normalised. Raises NotCompared where it can't compute them.
        """

    def prompt_inputs(
        self, model: "PreTrainedModel", samples: "list[LoadedSample]", batch: "Batch", pixels: "torch.Tensor"
    ) -> "dict[str, torch.Tensor]":
        """Return arguments of generate() for prompts, (B, T) and padded on the left. batch: of all of them."""


class FolderPart(Protocol):
    """The model folders that an extension reads. model_types: of their config.json."""

    model_types: Collection[str] = ()

    def read(self, path: str, config: dict, where: str) -> "ModelFolder":
        """Read a folder with one of Trigger.model_types. config: its config.json; where: as messages begin.

        Raises ConfigError, also for those that are not in model_types, with the reason.
        """

    def missing(self, config: dict) -> list[str]:
        """Return parts that a config.json has to have, and lacks."""

    def architecture(self, config: "PreTrainedConfig") -> Architecture:
        """Return the architecture of a configuration with one of model_types."""
