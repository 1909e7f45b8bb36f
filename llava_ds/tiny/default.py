"""Defaults of a run without a model: the tiny weights and generated scenes, set through the usual flags."""

from pathlib import Path

from llava_ds.config.arguments import Arguments, trains_projector_only
from llava_ds.tiny import CLIP_PATH, LLAMA_PATH
from llava_ds.tiny.scene_files import write_dataset


def fill_in(args: Arguments) -> Arguments:
    """Fill in the tiny model's folders and the generated data for flags that are not given.

    Writes the data on the first call. Flags that name a model are returned unchanged.
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
    """Folder of the generated scenes."""
    return Path(cache_dir).expanduser() / "scenes"


def heldout_data(cache_dir: str) -> tuple[str, str]:
    """Paths of the generated held-out questions and of the folder with their images. Writes them on the first call."""
    folder = scenes_folder(cache_dir)
    write_dataset(folder)
    return str(folder / "heldout.json"), str(folder)
