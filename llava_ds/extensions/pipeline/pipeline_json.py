"""DeepSpeed's section of a pipeline in the JSON, of which the number of stages alone is taken, and not passed on:
DeepSpeed would need an object of Megatron's beside it."""

from llava_ds.engine.ds_config.draft import as_json, size_shown

STAGES = "pipeline"
# Its other keys, with the values that ask for nothing, and what to do about the others.
OTHERS = {
    "partition": (("best", "auto"), "stages are cut so that their FLOPs are even"),
    "seed_layers": ((False,), "every part has a seed of its own"),
    "activation_checkpoint_interval": ((0,), "--gradient_checkpointing says which layers are recomputed"),
    "pipe_partitioned": ((True, False), ""),  # nothing reads them without Megatron's layers
    "grad_partitioned": ((True, False), ""),
    "use_reentrant": ((True, False), ""),
}


def stages_in(found: object, problems: list[str]) -> object:
    """The stages that DeepSpeed's section gives. Adds a line for each key that means something else."""
    if not isinstance(found, dict):
        if found is not None:
            problems.append(
                f'{STAGES} is {as_json(found)} in the DeepSpeed JSON: write {{"stages": {size_shown(found)}}}'
            )
        return None
    for key, value in found.items():
        harmless, why = OTHERS.get(key, ((), f'write {{"stages": {size_shown(found.get("stages"))}}} alone'))
        if key != "stages" and not any(value == one and type(value) is type(one) for one in harmless):
            problems.append(f"{STAGES}.{key} is {as_json(value)} in the DeepSpeed JSON: remove it, {why}")
    return found.get("stages")
