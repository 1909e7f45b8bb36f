"""Read the number of stages from DeepSpeed's pipeline section. The section is not passed to DeepSpeed.

DeepSpeed would require a Megatron object for it.
"""

from llava_ds.engine.ds_config.draft import as_json, size_shown

STAGES = "pipeline"
# Other keys, with their values that have no effect, and advice for all other values.
OTHERS = {
    "partition": (("best", "auto"), "stages are cut to equal FLOPs"),
    "seed_layers": ((False,), "every part has its own seed"),
    "activation_checkpoint_interval": ((0,), "--gradient_checkpointing says which layers are recomputed"),
    "pipe_partitioned": ((True, False), ""),  # only Megatron's layers read it
    "grad_partitioned": ((True, False), ""),
    "use_reentrant": ((True, False), ""),
}


def stages_in(found: object, problems: list[str]) -> object:
    """Return the number of stages in DeepSpeed's section. Appends a problem for each other key with an effect."""
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
