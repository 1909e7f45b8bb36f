"""compile of the JSON (DeepCompile)."""

from llava_ds.engine.ds_config.draft import Draft


def resolve_compile(draft: Draft) -> None:
    """Refuse DeepCompile where it can't run, or with flags that ask for something else."""
    if draft.get("compile.deepcompile") is not True:
        return
    if draft.device_type == "cpu":
        draft.refuse(
            "compile.deepcompile is true in the DeepSpeed JSON, but there is no GPU, for which DeepCompile is made: "
            "remove it"
        )
    if draft.get("zero_optimization.stage") in (0, None):
        draft.refuse("compile.deepcompile is true at ZeRO stage 0, where it does nothing: write stage 1, 2 or 3")
    # A section of the JSON that asks for checkpointing has set the flag by now.
    if draft.args.training.gradient_checkpointing != "off":
        draft.refuse(
            "compile.deepcompile is true in the DeepSpeed JSON with activation checkpointing: DeepCompile decides by "
            "itself what is saved, remove one of them"
        )


def deep_compiles(config: dict) -> bool:
    """True if the engine has to compile the model (DeepCompile)."""
    return config.get("compile", {}).get("deepcompile", False)
