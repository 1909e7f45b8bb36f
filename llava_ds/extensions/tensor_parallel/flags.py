"""The flag of tensor parallelism."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from llava_ds.config.bounds import Count
from llava_ds.config.flags import flags_of
from llava_ds.extensions.base import Axis, ExtensionFlags

_tensor, _ = flags_of("tensor_parallel")
_SECTION = 'write "tensor_parallel": {{"autotp_size": {size}}}'
_SIZES = ("tp", "tp_size", "tensor_model_parallel_size", "tensor_parallel_size", "tensor_parallel_degree")


@dataclass(frozen=True)
class Flags(ExtensionFlags):
    """The flag of tensor parallelism."""

    needs: ClassVar = {"dense_mlps": "AutoTP does not know upcycled experts"}
    breaks: ClassVar = ("whole_matrices",)
    keys: ClassVar = {
        f"tensor_parallel.{key}": "tensor_parallel_size" for key in ("autotp_size", "tp_size", "tp.tp_size")
    }
    other_keys: ClassVar = {
        **dict.fromkeys((*_SIZES, "autotp_size"), ((1,), _SECTION)),
        "model_parallel_size": ((1,), f"{_SECTION} for matrices that are cut"),
        "mp_size": ((1,), f"{_SECTION}: mp_size belongs to DeepSpeed's inference"),
    }
    other_names: ClassVar = {
        "--tensor_parallel_size": "--tensor_model_parallel_size --tp --autotp_size --tp_degree",
    }

    tensor_parallel_size: Count = _tensor(
        1,
        "Number of ranks that share the matrices of the language model's layers (DeepSpeed's AutoTP), for models or "
        "batches too large for ZeRO alone. They compute the same samples together, and add up partial results twice "
        "per layer, so they should be in one machine.",
        aliases=("--tp_size", "--deepspeed_autotp_size"),
        resume="layout",
        shares_samples=True,
    )

    @classmethod
    def in_json(cls, raw: Mapping[str, object], problems: list[str]) -> dict[str, tuple[object, str]]:
        """Return the size in DeepSpeed's section. Appends a problem for each other key with an effect."""
        from llava_ds.extensions.tensor_parallel.tensor_json import size_in  # imported only if the section exists

        return {"tensor_parallel_size": size_in(raw["tensor_parallel"], problems)}

    @property
    def axis(self) -> Axis:
        """Return the axis: adjacent ranks within every other axis."""
        return Axis("tp", "tensor_parallel_size", self.tensor_parallel_size, order=2, divides_model=True)
