"""DeepSpeed's monitors, timers and profilers."""

from importlib.util import find_spec

from llava_ds.engine.ds_config.draft import Draft
from llava_ds.files.writing import can_be_made

PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb", "comet": "comet_ml"}


def resolve_monitoring(draft: Draft) -> None:
    """Fill the folders of DeepSpeed's monitors; refuse monitors whose package is missing."""
    for section, package in PACKAGES.items():
        if draft.is_local and draft.get(f"{section}.enabled") and find_spec(package) is None:
            draft.refuse(
                f"{section}.enabled is true in the DeepSpeed JSON, but {package} is not installed: "
                f"pip install {package}, or write false"
            )
    for section in ("tensorboard", "csv_monitor"):
        if draft.get(f"{section}.enabled") and not draft.get(f"{section}.output_path"):
            draft.fill(f"{section}.output_path", str(draft.args.training.output_dir), "--output_dir")
        path = draft.get(f"{section}.output_path")
        if draft.is_local and draft.get(f"{section}.enabled") and path and not can_be_made(path):
            draft.refuse(f"{section}.output_path {path} can't be written to: name another folder")
    if draft.get("dump_state") and draft.get("log_level") is None:
        draft.fill("log_level", "info", "dump_state prints at this level")
