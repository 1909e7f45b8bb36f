"""Base classes for plugins: additional record fields, and kinds of projectors. Imported only if a plugin is loaded."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from llava_ds.constants import DataError

if TYPE_CHECKING:
    from torch import Tensor, nn


class RecordFields:
    """Additional keys that a plugin reads from records, and its conversion of other formats. The values are stored with
    the encoded record.

    names: the keys. Records may lack them, and they are not reported as unread. In a micro-batch,
    Batch.extra["<plugin>.<key>"] is a list with a tensor for each sample, or None for a sample without the key.
    """

    names: ClassVar[tuple[str, ...]] = ()
    columns: ClassVar[tuple[str, ...]] = ()  # additional columns of tables that convert() reads

    def convert(self, record: dict) -> dict | list[dict]:
        """Convert a record from the file to a supported format, or to several records. By default unchanged.

        Called in the process that reads the file, before the format is detected and images are looked up. Raise
        DataError to reject a record.
        """
        return record

    def load(self, values: Mapping[str, object]) -> "Mapping[str, Tensor]":
        """Convert a record's values to tensors. Called by loader processes, and once when the record is checked.

        values: the record's values, by key. By default, numbers or nested lists of numbers become float32 tensors.
        Raise DataError to reject the record because of a bad value.
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
