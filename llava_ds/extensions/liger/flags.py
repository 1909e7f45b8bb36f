"""The flag of Liger's kernels."""

from dataclasses import dataclass
from typing import ClassVar

from llava_ds.config.flags import flags_of
from llava_ds.extensions.base import ExtensionFlags

_liger, _ = flags_of("liger")


@dataclass(frozen=True)
class Flags(ExtensionFlags):
    """The flag of Liger's kernels."""

    needs: ClassVar = {"dense_mlps": "Liger has no kernels for upcycled experts"}
    fuses: ClassVar = "--use_liger_kernel True"

    use_liger_kernel: bool = _liger(
        False,
        "Use Liger's fused norms, rotary positions and SwiGLU in the language model (needs a GPU and the extra "
        "llava_ds[liger]), after comparing them with transformers' own on a small copy.",
    )
