"""Slots for values of a plugin: fields of records, and kinds of projectors. Loaded with a plugin only."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from llava_ds.constants import DataError

if TYPE_CHECKING:
    from torch import Tensor, nn


class RecordFields:
    """Additional keys of a record that a plugin reads, and formats that it converts. Values are stored with the encoded
    record.

    names: the keys. They count as read; a record may lack them. In a micro-batch, Batch.extra["<plugin>.<key>"] is a
    list with a tensor for each sample, None for a sample without the key.
    """

    names: ClassVar[tuple[str, ...]] = ()
    columns: ClassVar[tuple[str, ...]] = ()  # additional columns of tables that convert() reads

    def convert(self, record: dict) -> dict | list[dict]:
        """Convert a record of the file to a known format, or to several records. By default unchanged.

        Called in the process that reads the file, before the format is detected and images are looked up. Raises
        DataError for a bad record: it is rejected.
        """
        return record

    def load(self, values: Mapping[str, object]) -> "Mapping[str, Tensor]":
        """Convert a record's values to tensors, in a process that loads samples, and once when the record is checked.

        values: of the keys that the record has. By default numbers, or nested lists of them, become float32 tensors.
        Raises DataError for a bad value: the record is rejected.
        """
        import torch

        try:
            return {name: torch.tensor(value, dtype=torch.float32) for name, value in values.items()}
        except (TypeError, ValueError) as error:
            raise DataError(f"{' or '.join(map(repr, values))} is not numbers: {error}") from error


class ProjectorKind:
    """A projector that an extension adds to the values of --mm_projector_type (Extension.choices).

    option: the text after a colon in the value, as in my_projector:4; "" without one.
    """

    def stride(self, option: str) -> int:
        """Return the side, in patches, of the square that becomes one projected feature. Raises ConfigError."""
        return 1

    def build(self, option: str, tower_width: int, width: int) -> "nn.Module":
        """Build the projector, (N, P, C) to (N, P / stride**2, D), with its initial weights."""
        raise NotImplementedError
