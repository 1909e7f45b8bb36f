"""Flags of the data: records and images, and their conversion to tokens."""

from dataclasses import dataclass
from typing import Annotated, Literal

from llava_ds.boxes import BboxType
from llava_ds.config.bounds import MOST, Bounds, Count, NotNegative, Part, PartBelowOne, Workers
from llava_ds.config.flags import flags_of
from llava_ds.constants import MAX_IMAGE_PIXELS, PILLOW_MAX_PIXELS

# Flags that choose a sample order -> the name of this order in data/sample_order.py.
GROUPINGS = {
    "group_by_modality_length": "modality",
    "group_by_modality_length_auto": "modality_auto",
    "group_by_length": "length",
    "group_by_varlen": "varlen",
    "group_by_length_bucket": "bucket",
}

# Functions that declare flags of a group; the ones named _free declare flags that a resumed run may change freely.
_data, _data_free = flags_of("data")
_images, _images_free = flags_of("images")
_eval, _eval_free = flags_of("eval")
_order, _ = flags_of("order")


@dataclass(frozen=True)
class DataArguments:
    """Flags for records and images, and for their conversion to tokens."""

    data_path: str | None = _data_free(
        None,
        "Records (docs/data.md has their layouts): JSON, JSONL, CSV, parquet, WebDataset shards, a pattern of such "
        "files like shard-*.tar, a folder of such files, a saved datasets folder, a folder of images with "
        "metadata.jsonl, or a YAML mixture of these. Absent: generated scenes of coloured shapes.",
        path="pattern",
        remote=True,
    )
    data_split: str | None = _data_free(None, "Split of --data_path, such as train, for a folder with several splits.")
    data_format: Literal["auto", "llava", "sharegpt", "messages", "texts", "question_answer", "caption"] = _data(
        "auto", "Format of a record's conversation; auto detects it from the first records and prints it."
    )
    data_columns: str | None = _data(
        None,
        "Other names of a record's fields, like conversations=dialog,image=photo (known: id, conversations, "
        "messages, image, video, text, system, texts, history, prompt, query, question, instruction, input, "
        "completion, response, answer, output, chosen, rejected, margin).",
    )
    image_folder: str | None = _data_free(
        None, "Folder that the records' image paths are relative to.", path="folder", remote=True
    )
    video_folder: str | None = _data_free(
        None,
        "Folder that the records' video paths are relative to. Absent: --image_folder.",
        path="folder",
        remote=True,
    )
    image_aspect_ratio: str = _images(
        "square",
        "square: resize the short side and crop the centre; pad: first pad to a square with the mean colour; "
        "original: as the tower's own processor does (square for CLIP); anyres: tiles on the best grid of "
        "--image_grid_pinpoints, and an overview; anyres_max_N: the same, with features scaled down to N tiles' worth "
        "(LLaVA-OneVision).",
    )
    image_grid_pinpoints: str | None = _images(
        None,
        "Sizes that an anyres image may take, in pixels, like [(336,672),(672,336)], or a range of grids like "
        "(1x1),...,(6x6), width first. Absent: LLaVA-NeXT's five.",
    )
    min_pixels: Count | None = _images(
        None,
        "For ready models whose images keep their size: scale an image up to at least this many pixels. Absent: as "
        "the model's image processor says.",
    )
    max_pixels: Count | None = _images(
        None, "Likewise: scale an image down to at most this many pixels, to limit its tokens."
    )
    video_min_pixels: Count | None = _images(
        None,
        "Likewise for videos: pixels of one frame or, if the model writes times between frames, of all frames "
        "together. Absent: as the model's video processor says.",
    )
    video_max_pixels: Count | None = _images(None, "Likewise: at most this many pixels per frame, or for all frames.")
    max_image_pixels: Annotated[int, Bounds(1, PILLOW_MAX_PIXELS)] = _images_free(
        MAX_IMAGE_PIXELS, "Images with more pixels are refused before decoding. The upper bound is Pillow's own."
    )
    fast_image_decoding: bool = _images(
        False,
        "Resize images with torch instead of Pillow: about 3 times as fast for LLaVA's images; no value differs by "
        "more than 2 of 255.",
    )
    image_value_range: str | None = _images(
        None,
        "Values of images with more than 8 bits (16 or 32 bits, floats) that become black and white: LOW,HIGH, like "
        "0,4095, or image for each image's own least and largest. Absent: 0 to 65,535 for 16 bits, 0 to 255 for "
        "floats; the first lines name images that become nearly black.",
    )
    video_fps: Count = _images(1, "Frames per second to take from a video file.")
    frames_upbound: NotNegative = _images(
        32,
        "Maximum number of frames per video, evenly spaced in a longer one. 0: no limit (LLaVA-NeXT's default); a "
        "long video may then take any amount of memory.",
    )
    force_sample: bool = _images(
        False, "Take --frames_upbound evenly spaced frames of every video file, even if --video_fps gives fewer."
    )
    mm_spatial_pool_stride: Count = _images(
        2, "Side of the squares of video features that are pooled into one; 1 pools nothing."
    )
    mm_spatial_pool_mode: Literal["average", "max", "bilinear"] = _images("bilinear", "How video features are pooled.")
    mm_newline_position: Literal["grid", "frame", "one_token", "no_token"] = _images(
        "grid",
        "Position of the learned newline in a video's features, with --mm_patch_merge_type spatial_unpad…: after every "
        "row, after every frame, once, or nowhere.",
    )
    model_max_length: Annotated[int, Bounds(2, MOST)] = _data(
        2048, "Longest sample in tokens, image features included."
    )
    supervise_last_turn_only: bool = _data(
        False, "Compute the loss on the last answer of each conversation only; False: on every answer."
    )
    eval_data_path: str | None = _eval_free(
        None,
        "Samples for the eval loss, excluded from training, in any format of --data_path.",
        path="pattern",
        remote=True,
    )
    eval_data_split: str | None = _eval_free(None, "Split of --eval_data_path, for a folder with several splits.")
    eval_fraction: PartBelowOne = _eval(
        0.0,
        "Fraction of the samples to hold out of training for the eval loss, drawn with --data_seed.",
    )
    on_unmarked_image: Literal["refuse", "prepend", "text"] = _data(
        "prepend",
        "Treatment of a record with images and no <image> mark in its text. prepend: insert the images before its "
        "first question; refuse: count it as a bad sample; text: train on its text alone, as LLaVA does. text also "
        "accepts a record with marks and no image: a bad sample under the other two.",
    )
    bbox_type: BboxType = _data(
        "real",
        "Coordinates of boxes and points under 'objects' in records without a bbox_type (docs/grounding.md): real, "
        "in pixels of the image; norm1, from 0 to 1 of its width and height; norm1000, from 0 to 1000. They are "
        "rescaled for the model's family.",
    )
    on_bad_sample: Literal["skip", "stop"] = _data_free(
        "skip", "Treatment of records and images that can't be used: skip them, or end the run at the first."
    )
    max_bad_fraction: Part = _data_free(0.01, "End the run if more than this fraction of the records would be skipped.")
    shuffle: bool = _order(True, "Draw the samples in random order; False keeps the order of the files.")
    group_by_modality_length: bool = _order(
        False, "Group samples of similar length and kind (text, images) into a step, in the order of LLaVA's sampler."
    )
    group_by_modality_length_auto: bool = _order(
        False, "The same in the order of LLaVA-NeXT's sampler, with samples of similar length in every step."
    )
    group_by_length: bool = _order(
        False, "Group samples of similar length into a step, in the order of LLaVA-NeXT's sampler."
    )
    group_by_varlen: bool = _order(
        False,
        "Group samples of similar length, in the order of LLaVA-NeXT's varlen sampler; the groups depend on "
        "--gradient_accumulation_steps.",
    )
    group_by_length_bucket: bool = _order(
        False, "Group samples of similar length in tokens, each step from one bucket: more even than the orders above."
    )
    preprocessing_num_workers: Annotated[int, Bounds(1, 4096)] | None = _data_free(
        None,
        "Processes per machine that check and encode the data, and look for changed images. Absent: one per core.",
        per_machine=True,
    )
    cache_dir: str = _data_free(
        "~/.cache/llava_ds",
        "Folder for encoded data sets, for copies of images that are stored inside records, and for the generated "
        "scenes. Nodes should share it.",
        path="output",
    )
    dataloader_num_workers: Workers | None = _data_free(
        None,
        "Processes per rank that decode images ahead; 0: decode between steps. Absent: 4 with a GPU, 0 without.",
        per_machine=True,
    )
