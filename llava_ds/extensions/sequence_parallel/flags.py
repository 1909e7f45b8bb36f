"""The flag of sequence parallelism."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from llava_ds.config.bounds import Count
from llava_ds.config.flags import flags_of
from llava_ds.extensions.base import Axis, ExtensionFlags

if TYPE_CHECKING:
    from llava_ds.config.arguments import Arguments

_sequence, _ = flags_of("sequence_parallel")


@dataclass(frozen=True)
class Flags(ExtensionFlags):
    """The flag of sequence parallelism.

    It is not passed to DeepSpeed (0.19.8): without a Megatron object DeepSpeed would not sum gradients, and with one it
    would divide them differently at each ZeRO stage.
    """

    needs: ClassVar = {"dense_mlps": "it is untested with upcycled experts"}
    breaks: ClassVar = ("whole_sample",)
    keys: ClassVar = {"sequence_parallel_size": "sequence_parallel_size"}
    other_keys: ClassVar = dict.fromkeys(
        ("cp", "cp_size", "sp", "sp_size", "context_parallel_size", "ulysses_size", "ulysses_parallel_size"),
        ((1,), 'write "sequence_parallel_size": {size}, which divides tokens over ranks, and attention by heads'),
    )
    other_names: ClassVar = {
        "--sequence_parallel_size": "--context_parallel_size --cp_size --hyper_parallel_cp_size --ulysses_size"
    }

    sequence_parallel_size: Count = _sequence(
        1,
        "Number of ranks that share the tokens of every micro-batch (Ulysses), for samples too long for one rank: each "
        "decodes and encodes its own images, and computes attention for a part of the heads. "
        "--per_device_train_batch_size counts for all of them together, --tokens_per_micro_batch for each.",
        aliases=("--sp_size",),
        resume="layout",
        shares_samples=True,
    )

    @classmethod
    def saving_memory(cls, args: "Arguments", tokens: int, is_one_sample: bool) -> Iterator[str]:
        """Suggest more ranks per sample if a micro-batch has only one sample."""
        if is_one_sample and "routerless_mlps" not in args.broken:
            yield f"--sequence_parallel_size {2 * args.size_of('sp')}, on several GPUs: more of them share each sample"

    @property
    def axis(self) -> Axis:
        """Return the axis: adjacent ranks within the data axis."""
        return Axis("sp", "sequence_parallel_size", self.sequence_parallel_size, order=1, divides_model=False)
