"""The JSON's compile section (DeepCompile)."""

from llava_ds.engine.ds_config.draft import Draft


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
    # A section of the JSON for checkpointing has already set the flag.
    if draft.args.training.gradient_checkpointing != "off":
        draft.refuse(
            "compile.deepcompile is true in the DeepSpeed JSON with activation checkpointing: DeepCompile itself "
            "chooses the saved activations, remove one of them"
        )


def deep_compiles(config: dict) -> bool:
    """True if the engine compiles the model (DeepCompile)."""
    return config.get("compile", {}).get("deepcompile", False)
