"""The flags of torch.compile."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from llava_ds.config.flags import flags_of
from llava_ds.extensions.base import ExtensionFlags

if TYPE_CHECKING:
    from llava_ds.config.arguments import Arguments

_compile, _ = flags_of("compile")


@dataclass(frozen=True)
class Flags(ExtensionFlags):
    """The flags of torch.compile."""

    torch_compile: bool = _compile(
        False, "Compile the repeated layers of tower and language model with torch.compile (needs a compiler)."
    )
    torch_compile_backend: str | None = _compile(None, "Backend of --torch_compile. Absent: torch's default, inductor.")

    @property
    def compiles(self) -> bool:
        """True if --torch_compile is True; a backend alone compiles nothing."""
        return self.torch_compile

    @property
    def needs(self) -> Mapping[str, str]:
        """Return the required keys of PROPERTIES, each with the reason."""
        if not self.torch_compile:
            return {}
        untried = dict.fromkeys(("whole_matrices", "whole_layers", "given_answers"), "nothing else is tested")
        return {**untried, "dense_mlps": "the host reads how many tokens an expert has"}

    def problems(self, args: "Arguments") -> Iterator[str]:
        """Yield a line for a backend alone. Allows --torch_compile False with a backend, as in LLaVA-NeXT's scripts."""
        if not self.torch_compile and "torch_compile" not in args.given:
            yield f"--torch_compile_backend {self.torch_compile_backend} needs --torch_compile True"
