"""Defaults for a run without --model_name_or_path: flags that name the tiny weights and the generated scenes."""

from pathlib import Path

from llava_ds.config.arguments import Arguments, trains_projector_only
from llava_ds.tiny import CLIP_PATH, LLAMA_PATH
from llava_ds.tiny.scene_files import write_dataset


def fill_in(args: Arguments) -> Arguments:
    """Return the flags with the tiny model's folders and the generated data filled in, if no model is given.

    Writes the data on the first call. If the flags name a model, they are returned unchanged.
    """
    if args.model.model_name_or_path is not None:
        return args
    args = args.replaced(model_name_or_path=str(LLAMA_PATH), vision_tower=str(CLIP_PATH))
    if args.data.data_path is not None:
        return args
    folder = scenes_folder(args.data.cache_dir)
    write_dataset(folder)
    split = "pretrain" if trains_projector_only(args.model) else "finetune"
    return args.replaced(data_path=str(folder / f"{split}.json"), image_folder=str(folder))


def scenes_folder(cache_dir: str) -> Path:
    """Return the folder of the generated scenes."""
    return Path(cache_dir).expanduser() / "scenes"


def heldout_data(cache_dir: str) -> tuple[str, str]:
    """Return the paths of the generated held-out questions and of their image folder. Writes them on the first call."""
    folder = scenes_folder(cache_dir)
    write_dataset(folder)
    return str(folder / "heldout.json"), str(folder)
