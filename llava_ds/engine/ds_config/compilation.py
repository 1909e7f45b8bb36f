"""compile of the JSON (DeepCompile), and --torch_compile."""

import torch

from llava_ds.engine.ds_config.draft import Draft


def resolve_compile(draft: Draft) -> None:
    """Refuse DeepCompile where it can't run, or with flags that ask for something else."""
    _check_backend(draft)
    if draft.get("compile.deepcompile") is not True:
        return
    if draft.device_type == "cpu":
        draft.refuse(
            "compile.deepcompile is true in the DeepSpeed JSON, but there is no GPU, for which DeepCompile is made: "
            "remove it; --torch_compile True compiles the layers on any machine"
        )
    if draft.get("zero_optimization.stage") in (0, None):
        draft.refuse("compile.deepcompile is true at ZeRO stage 0, where it does nothing: write stage 1, 2 or 3")
    training = draft.args.training
    if training.torch_compile:
        draft.refuse(
            "compile.deepcompile is true in the DeepSpeed JSON but --torch_compile is True: both compile the model, "
            "remove one of them"
        )
    if training.gradient_checkpointing != "off":  # which a section of the JSON that asks for something has set by now
        draft.refuse(
            "compile.deepcompile is true in the DeepSpeed JSON with activation checkpointing: DeepCompile decides by "
            "itself what is saved, remove one of them"
        )


def _check_backend(draft: Draft) -> None:
    backend, given = draft.args.training.torch_compile_backend, draft.args.given
    if backend is None:
        return
    if not draft.args.training.torch_compile:
        if "torch_compile" not in given:  # LLaVA-NeXT's scripts say both, also where they don't compile
            draft.refuse(f"--torch_compile_backend {backend} needs --torch_compile True")
        return
    known = torch._dynamo.list_backends(exclude_tags=())
    if backend not in known:
        draft.refuse(f"--torch_compile_backend {backend} is unknown to torch: give one of {', '.join(known)}")


def deep_compiles(config: dict) -> bool:
    """True if the engine has to compile the model (DeepCompile)."""
    return config.get("compile", {}).get("deepcompile", False)
