"""DeepSpeed's pipeline section in the JSON: only the number of stages is read, and the section is not passed on.

DeepSpeed would also need a Megatron object.
"""

from llava_ds.engine.ds_config.draft import as_json, size_shown

STAGES = "pipeline"
# Other keys: their values without an effect, and the advice for any other value.
OTHERS = {
    "partition": (("best", "auto"), "stages are cut to equal FLOPs"),
    "seed_layers": ((False,), "every part has its own seed"),
    "activation_checkpoint_interval": ((0,), "--gradient_checkpointing says which layers are recomputed"),
    "pipe_partitioned": ((True, False), ""),  # only Megatron's layers read it
    "grad_partitioned": ((True, False), ""),
    "use_reentrant": ((True, False), ""),
}


def stages_in(found: object, problems: list[str]) -> object:
    """Return the stages of DeepSpeed's section. Adds a line for each key with another meaning."""
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
