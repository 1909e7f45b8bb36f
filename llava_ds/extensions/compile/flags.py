"""The flags of torch.compile."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from llava_ds.config.flags import flags_of
from llava_ds.extensions.base import ExtensionFlags

if TYPE_CHECKING:
    from llava_ds.config.arguments import Arguments

_compile, _ = flags_of("compile")


@dataclass(frozen=True)
class Flags(ExtensionFlags):
    """The flags of torch.compile."""

    compiles: ClassVar = True
    needs: ClassVar = {
        "dense_mlps": "how many tokens an expert has is read by the host",
        "whole_matrices": "it is not tried with matrices that are cut",
        "whole_layers": "it is not tried with stages",
        "one_step_one_batch": "it is not tried with answers that a run draws",
    }

    torch_compile: bool = _compile(
        False, "Compile the repeated layers of tower and language model with torch.compile (needs a compiler)."
    )
    torch_compile_backend: str | None = _compile(None, "Backend of --torch_compile. Absent: torch's default, inductor.")

    def problems(self, args: "Arguments") -> Iterator[str]:
        """LLaVA-NeXT's scripts name a backend also where they say that nothing is compiled."""
        if not self.torch_compile and "torch_compile" not in args.given:
            yield f"--torch_compile_backend {self.torch_compile_backend} needs --torch_compile True"
