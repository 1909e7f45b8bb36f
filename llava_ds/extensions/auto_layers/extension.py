"""Choose the layers to checkpoint by the memory of the largest micro-batch (--gradient_checkpointing auto)."""

from llava_ds.engine.warm_up import NewEngine
from llava_ds.extensions.auto_layers.activation_budget import choose_checkpointed_layers
from llava_ds.extensions.base import Extension


def choose_for_run(new: NewEngine) -> list[str]:
    """Choose the layers to checkpoint in a run, unless no step is left. Returns lines that report the choice."""
    largest, budget = new.largest, new.resolved.args.training.activation_memory_gb
    if largest is None:
        return []
    with new.watch(largest):
        return choose_checkpointed_layers(new.runner.engine, largest, new.parts, new.moments, budget, new.ranks)


extension = Extension(choices={"gradient_checkpointing": choose_for_run})
