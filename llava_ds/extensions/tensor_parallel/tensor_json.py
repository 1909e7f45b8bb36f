"""Read the number of ranks from DeepSpeed's tensor parallelism section in the JSON."""

from llava_ds.engine.ds_config.draft import as_json, size_shown

SECTION = "tensor_parallel"
# Other keys, with their values that have no effect, and advice for all other values.
_OTHERS = {
    "enabled": ((True,), "the size alone decides"),
    "tp_grain_size": ((1,), "matrices are cut into equal parts, by heads"),
    "mpu": ((), "it is an object of Megatron's: the size alone lays the ranks out"),
    "tp_group": ((), "the size alone lays the ranks out"),
    "tp_overlap_comm": ((False,), "DeepSpeed 0.19.8 gets the gradients of biases wrong with it"),
    "vocab_parallel_lm_head": ((False,), "the output layer is whole on every rank"),
    "vocab_parallel_ce_backend": (("torch",), "the output layer is whole on every rank"),
    "partition_config": ((), "which matrices are cut follows from the model"),
    "preset_model": ((), "which matrices are cut follows from the model"),
    "injection_policy_tuple": ((), "which matrices are cut follows from the model"),
    "keep_module_on_host": ((False,), "it is made for inference"),
    "replace_with_kernel_inject": ((False,), "it is made for inference"),
    "kernel_inject": ((False,), "it is made for inference"),
    "dtype": ((), "weights train in the precision of bf16, fp16 or fp32"),
}


def size_in(found: object, problems: list[str]) -> tuple[object, str]:
    """Return the size in DeepSpeed's section, and its key. Appends a problem for each other key with an effect."""
    if found is None or found == {}:
        return None, SECTION
    if not isinstance(found, dict):
        problems.append(
            f'{SECTION} is {as_json(found)} in the DeepSpeed JSON: write {{"autotp_size": {size_shown(found)}}}'
        )
        return None, SECTION
    inner = found.get("tp") or {}
    if not isinstance(inner, dict):
        problems.append(
            f'{SECTION}.tp is {as_json(inner)} in the DeepSpeed JSON: write {{"tp_size": {size_shown(inner)}}}'
        )
        inner = {}
    if found.get("enabled") is False:
        return None, SECTION
    flat = {**{f"tp.{key}": value for key, value in inner.items()}, **found}
    flat.pop("tp", None)
    sizes: dict[str, object] = {}
    asked = next((flat[key] for key in ("autotp_size", "tp_size", "tp.tp_size") if key in flat), None)
    for key, value in flat.items():
        name = key.removeprefix("tp.")
        if value is None:
            continue
        if name in ("autotp_size", "tp_size"):
            sizes[f"{SECTION}.{key}"] = 1 if value == 0 and value is not False else value  # DeepSpeed's 0 means off
            continue
        harmless, why = _OTHERS.get(name, ((), f'write {{"autotp_size": {size_shown(asked)}}} alone'))
        if not any(value == one and type(value) is type(one) for one in harmless):
            problems.append(f"{SECTION}.{key} is {as_json(value)} in the DeepSpeed JSON: remove it, {why}")
    if "tp.tp_size" in flat and flat["tp.tp_size"] == 1 and len(sizes) > 1:
        del sizes[f"{SECTION}.tp.tp_size"]  # DeepSpeed's default
    if len(set(map(as_json, sizes.values()))) > 1:
        said = " and ".join(f"{key} is {as_json(value)}" for key, value in sizes.items())
        problems.append(f"{said} in the DeepSpeed JSON: write one of them")
        return None, SECTION
    return next(((size, key) for key, size in sizes.items()), (None, SECTION))
