"""Flags of the data: records and images, and how they become tokens."""

from dataclasses import dataclass
from typing import Annotated, Literal

from llava_ds.config.bounds import MOST, Bounds, Count, NotNegative, Part, PartBelowOne, Workers
from llava_ds.config.flags import flag
from llava_ds.constants import MAX_IMAGE_PIXELS, PILLOW_MAX_PIXELS

# Flags that choose an order of the samples, and its name in data/sample_order.py.
GROUPINGS = {
    "group_by_modality_length": "modality",
    "group_by_modality_length_auto": "modality_auto",
    "group_by_length": "length",
    "group_by_varlen": "varlen",
    "group_by_length_bucket": "bucket",
}


@dataclass(frozen=True)
class DataArguments:
    """Flags of the records and images, and of their tokens."""

    data_path: str | None = flag(
        None,
        "Records: LLaVA or ShareGPT JSON, JSONL, OpenAI messages, parquet, a saved datasets folder, a folder with "
        "metadata.jsonl, WebDataset shards (a folder, or a pattern like shard-*.tar), or a YAML mixture of these. "
        "Absent: generated scenes of coloured shapes.",
        group="data",
        path="pattern",
        resume="free",
    )
    data_format: Literal["auto", "llava", "sharegpt", "messages", "caption"] = flag(
        "auto", "Format of a record's conversation; auto detects it from the first records and prints it.", group="data"
    )
    data_columns: str | None = flag(
        None,
        "Other names of a record's fields, like conversations=dialog,image=picture (known: id, conversations, "
        "messages, image, video, text, system).",
        group="data",
    )
    image_folder: str | None = flag(
        None, "Folder that the records' image paths are relative to.", group="data", path="folder", resume="free"
    )
    video_folder: str | None = flag(
        None,
        "Folder that the records' video paths are relative to. Absent: --image_folder.",
        group="data",
        path="folder",
        resume="free",
    )
    image_aspect_ratio: str = flag(
        "square",
        "square: resize the short side and crop the centre; pad: first pad to a square with the mean colour; "
        "original: as the tower's own processor does, which is square for CLIP; anyres: tiles on the best grid of "
        "--image_grid_pinpoints, and an overview; anyres_max_N: the same, with features scaled down to those of N "
        "tiles (LLaVA-OneVision).",
        group="images",
    )
    image_grid_pinpoints: str | None = flag(
        None,
        "Sizes that an anyres image may take, in pixels, like [(336,672),(672,336)], or a range of grids like "
        "(1x1),...,(6x6), width first. Absent: LLaVA-NeXT's five.",
        group="images",
    )
    max_image_pixels: Annotated[int, Bounds(1, PILLOW_MAX_PIXELS)] = flag(
        MAX_IMAGE_PIXELS,
        "Images with more pixels are refused before decoding. The upper bound is Pillow's own.",
        group="images",
        resume="free",
    )
    fast_image_decoding: bool = flag(
        False,
        "Resize images with torch in place of Pillow: about 3 times as many of LLaVA's images a second, and no value "
        "differs by more than 2 of 255.",
        group="images",
    )
    video_fps: Count = flag(1, "Frames taken from each second of a video file.", group="images")
    frames_upbound: NotNegative = flag(
        32,
        "Largest number of frames of a video; from a longer one they are taken evenly. 0 is no limit, LLaVA-NeXT's own "
        "default, with which a long video may take any amount of memory.",
        group="images",
    )
    force_sample: bool = flag(
        False,
        "Take --frames_upbound evenly spaced frames of every video file, also where --video_fps gives fewer.",
        group="images",
    )
    mm_spatial_pool_stride: Count = flag(
        2, "Side of the squares of video features that are pooled into one; 1 pools nothing.", group="images"
    )
    mm_spatial_pool_mode: Literal["average", "max", "bilinear"] = flag(
        "bilinear", "How video features are pooled.", group="images"
    )
    mm_newline_position: Literal["grid", "frame", "one_token", "no_token"] = flag(
        "grid",
        "Position of the learned newline in a video's features, with --mm_patch_merge_type spatial_unpad…: after every "
        "row, after every frame, once, or nowhere.",
        group="images",
    )
    model_max_length: Annotated[int, Bounds(2, MOST)] = flag(
        2048, "Longest sample in tokens, image features included.", group="data"
    )
    supervise_last_turn_only: bool = flag(
        False, "Compute the loss on the last answer of each conversation only; False: on every answer.", group="data"
    )
    eval_data_path: str | None = flag(
        None,
        "Samples to compute the eval loss on, which are not trained on, in any format of --data_path.",
        group="eval",
        path="data",
        resume="free",
    )
    eval_fraction: PartBelowOne = flag(
        0.0,
        "Fraction of the samples that is kept out of training, to compute the eval loss on; --data_seed draws them.",
        group="eval",
    )
    sample_data_path: str | None = flag(
        None,
        "Samples whose first questions are answered at --sample_steps, those with images first, in any format of "
        "--data_path. Absent: the eval samples, or else the training samples.",
        group="eval",
        path="data",
        resume="free",
    )
    on_unmarked_image: Literal["refuse", "prepend", "text"] = flag(
        "prepend",
        "Treatment of a record with images and no <image> mark in its text. prepend: insert the images before its "
        "first question; refuse: count it as a bad sample; text: train on its text alone, as LLaVA does. text also "
        "accepts a record with marks and no image, which is a bad sample for the other two.",
        group="data",
    )
    on_bad_sample: Literal["skip", "stop"] = flag(
        "skip",
        "Treatment of records and images that can't be used: skip them, or end the run at the first.",
        group="data",
        resume="free",
    )
    max_bad_fraction: Part = flag(
        0.01,
        "End the run when more than this fraction of the records would be skipped.",
        group="data",
        resume="free",
    )
    shuffle: bool = flag(True, "Draw the samples in random order; False keeps the order of the files.", group="order")
    group_by_modality_length: bool = flag(
        False,
        "Group samples of similar length and kind (text, images) into a step, in the order of LLaVA's sampler.",
        group="order",
    )
    group_by_modality_length_auto: bool = flag(
        False,
        "The same in the order of LLaVA-NeXT's sampler, with samples of similar length in every step.",
        group="order",
    )
    group_by_length: bool = flag(
        False, "Group samples of similar length into a step, in the order of LLaVA-NeXT's sampler.", group="order"
    )
    group_by_varlen: bool = flag(
        False,
        "Group samples of similar length in the order of LLaVA-NeXT's sampler; the groups depend on "
        "--gradient_accumulation_steps.",
        group="order",
    )
    group_by_length_bucket: bool = flag(
        False,
        "Group samples of similar length in tokens, every step from one bucket: more even than the orders above.",
        group="order",
    )
    preprocessing_num_workers: Annotated[int, Bounds(1, 4096)] | None = flag(
        None,
        "Processes that check and encode the data. Absent: one per core.",
        group="data",
        resume="free",
        per_machine=True,
    )
    cache_dir: str = flag(
        "~/.cache/llava_ds",
        "Folder for encoded data sets, for copies of images that are stored inside records, and for the generated "
        "scenes. Nodes should share it.",
        group="data",
        path="output",
        resume="free",
    )
    dataloader_num_workers: Workers = flag(
        0,
        "Processes per rank that decode images ahead; 0 decodes between steps.",
        group="data",
        resume="free",
        per_machine=True,
    )
