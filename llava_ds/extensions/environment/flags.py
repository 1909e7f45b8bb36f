"""Flags of answers in several turns."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from llava_ds.config.bounds import Count
from llava_ds.config.flags import flags_of
from llava_ds.extensions.base import ExtensionFlags, Number

if TYPE_CHECKING:
    from llava_ds.config.arguments import Arguments

_environment, _ = flags_of("environment")


@dataclass(frozen=True)
class Flags(ExtensionFlags):
    """Flags of answers in several turns."""

    environment: str | None = _environment(
        None,
        "grpo and ppo: file.py:Class, a Python class that is run with your rights and speaks between the model's turns "
        "(docs/environment.md). --max_completion_length then limits everything after the prompt.",
    )
    max_turns: Count = _environment(4, "with --environment: turns of the model in an episode.")
    max_turn_length: Count | None = _environment(
        None, "with --environment: longest turn of the model in tokens. Absent: what --max_completion_length leaves."
    )

    judges: ClassVar[bool] = True
    other_names: ClassVar = {"--max_turns": "--max_tool_calling_iterations --max_assistant_turns"}
    numbers: ClassVar = {
        "episodes/turns": Number("Turns of an episode", "turns {:.1f}"),
        "episodes/bound_ratio": Number("Share of episodes that a bound of turns or tokens ended"),
    }

    def problems(self, args: "Arguments") -> Iterator[str]:
        """Yield a line for every missing or conflicting flag."""
        if self.environment is None:
            for name in sorted(args.given & {"max_turns", "max_turn_length"}):
                yield f"--{name} has no effect without --environment: give that, or leave it out"
            return
        if not args.traits.draws:
            kind = args.training.objective
            yield f"--environment can't be used with --objective {kind}, which samples no answers: give grpo or ppo"
            return
        if args.own["rl"].vllm_server is not None:
            yield "--vllm_server can't be used with --environment: it samples one turn, from files: leave it out"
        if (ratio := args.data.image_aspect_ratio).startswith("anyres"):
            yield f"--image_aspect_ratio {ratio} can't be used with --environment: it cuts single images only, give pad"
