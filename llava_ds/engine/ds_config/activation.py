"""The JSON's activation_checkpointing and compile (DeepCompile) sections, and the equivalent flags."""

from llava_ds.engine.ds_config.draft import Draft

SECTION = "activation_checkpointing"
SWITCHES = ("partition_activations", "contiguous_memory_optimization", "cpu_checkpointing")


def resolve_activation_checkpointing(draft: Draft) -> None:
    """Set --gradient_checkpointing to "all" if the section enables something, and refuse flags that contradict it.

    A section that enables nothing, as in templates, has no effect.
    """
    args = draft.args
    number = draft.get(f"{SECTION}.number_checkpoints")
    if draft.get(f"{SECTION}.contiguous_memory_optimization"):
        for needed in ("partition_activations", "number_checkpoints"):
            if not draft.get(f"{SECTION}.{needed}"):
                draft.refuse(
                    f"{SECTION}.contiguous_memory_optimization is true in the DeepSpeed JSON without {needed}: write "
                    f"{needed} as well, because DeepSpeed makes one buffer for that many partitioned inputs of layers"
                )
    if (switch := switched_on(draft.config)) is None:
        if "gradient_checkpointing_every_n_layers" in args.given and args.training.gradient_checkpointing != "all":
            every = args.training.gradient_checkpointing_every_n_layers
            draft.refuse(f"--gradient_checkpointing_every_n_layers {every} needs --gradient_checkpointing all")
        return
    flag = args.training.gradient_checkpointing
    if "gradient_checkpointing" in args.given and flag != "all":
        remedy = "give all, or remove the section" if flag == "auto" else "remove one of them"
        draft.refuse(
            f"{SECTION}.{switch} is set in the DeepSpeed JSON but --gradient_checkpointing is {flag}: {remedy}"
        )
    if number is not None and "gradient_checkpointing_every_n_layers" in args.given:
        every = args.training.gradient_checkpointing_every_n_layers
        draft.refuse(
            f"{SECTION}.number_checkpoints is {number} in the DeepSpeed JSON but "
            f"--gradient_checkpointing_every_n_layers is {every}: remove one of them, both choose the "
            "checkpointed layers"
        )
    draft.args = args.replaced(gradient_checkpointing="all")


def switched_on(config: dict) -> str | None:
    """Return the first key that switches checkpointing on, or None."""
    section = config.get(SECTION, {})
    return next((key for key in (*SWITCHES, "number_checkpoints") if section.get(key)), None)


def resolve_compile(draft: Draft) -> None:
    """Refuse DeepCompile if it can't run here, or if flags contradict it."""
    if draft.get("compile.deepcompile") is not True:
        return
    if draft.device_type == "cpu":
        draft.refuse(
            "compile.deepcompile is true in the DeepSpeed JSON, but DeepCompile needs a GPU, and there is none: "
            "remove it"
        )
    if draft.get("zero_optimization.stage") in (0, None):
        draft.refuse("compile.deepcompile is true, but does nothing at ZeRO stage 0: write stage 1, 2 or 3")
    # resolve_activation_checkpointing has already set the flag if the JSON enables checkpointing.
    if draft.args.training.gradient_checkpointing != "off":
        draft.refuse(
            "compile.deepcompile is true in the DeepSpeed JSON with activation checkpointing: DeepCompile itself "
            "chooses the saved activations, remove one of them"
        )


def deep_compiles(config: dict) -> bool:
    """True if the engine compiles the model (DeepCompile)."""
    return config.get("compile", {}).get("deepcompile", False)
