"""Export a ready model: weights under their original names, config.json, and the processor's files."""

import dataclasses
import shutil
from functools import partial
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase
from transformers.utils import IMAGE_PROCESSOR_NAME, PROCESSOR_NAME, VIDEO_PROCESSOR_NAME

from llava_ds.config.arguments import Arguments, DataArguments, ModelArguments, TrainingArguments
from llava_ds.data.chat_template import answer_end
from llava_ds.export.bit_check import Written
from llava_ds.export.export_plan import ExportPlan
from llava_ds.export.safetensors_shards import write_shards
from llava_ds.export.tensors import Entry, completed, renamed, turned
from llava_ds.export.tokenizer_files import write_json
from llava_ds.extensions.active import plugin_entries
from llava_ds.extensions.ready.families.qwen_vl import pixel_bounds
from llava_ds.extensions.ready.family import ReadyModel
from llava_ds.extensions.ready.ready_images import ReadyImageOptions
from llava_ds.extensions.ready.ready_tilings import CellTiling, FrameCells, SplitTiling
from llava_ds.extensions.ready.ready_videos import VideoRule
from llava_ds.extensions.ready.ready_vision import VALUE_RANGE, frames_options, plan_videos
from llava_ds.extensions.ready.tensor_names import ReadyNames, names_in_folder
from llava_ds.files.model_files import (
    JSON_FILES,
    OTHER_FILES,
    TEMPLATES_FOLDER,
    check_folder,
    read_json,
    read_json_if_there,
)
from llava_ds.files.processor_files import SETTINGS_FILES, TEMPLATE_FILES, video_settings, whole_settings
from llava_ds.model.open.tower import read_processor, read_whole_processor
from llava_ds.model.open.weights import WeightFiles
from llava_ds.tilings import Tiling

_GENERATION_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")

# Files of the source folder that aren't copied: they are rewritten, or belong to an adapter.
NOT_COPIED = ("config.json", "adapter_config.json", *SETTINGS_FILES, *TEMPLATE_FILES)


def ready_entries(export: ExportPlan, entries: list[Entry]) -> list[Entry]:
    """Return the entries under their names in the source folder, with experts transposed if they are there.

    Adds the source folder's tensors that never train, and its parts that images don't use.
    """
    names = ReadyNames(export.model.architecture, export.model.text_config)
    files = WeightFiles(export.source_folder)
    shapes = files.shapes
    known = names_in_folder(names, shapes)
    found = renamed(entries, lambda name: known.get(name) or names.from_part(name))
    trained = [turned(entry) if _is_turned(entry.shape, shapes.get(entry.name)) else entry for entry in found]
    unchanged = [name for name in shapes if names.is_unchanged(name)]
    return completed(trained, (Entry(name, shapes[name], partial(_read, files, name)) for name in unchanged))


def _read(files: WeightFiles, name: str) -> torch.Tensor:
    (found,) = files.read([name])
    return found[1].clone()


def _is_turned(shape: tuple[int, ...], on_disk: tuple[int, ...] | None) -> bool:
    """Return True if experts with shape (E, O, I) in memory are stored as (E, I, O)."""
    return len(shape) == 3 and shape != on_disk == (shape[0], shape[2], shape[1])


def processor_files(
    ready: ReadyModel, options: ReadyImageOptions, tokenizer: PreTrainedTokenizerBase, source: Path
) -> dict[str, dict]:
    """Return the contents of a ready model's processor files, by name.

    They contain the source's settings, updated with the run's sizes of images and videos and its choice of frames.
    preprocessor_config.json repeats settings of processor_config.json for programs that read only the former.
    """
    where = str(source)
    images, whole = read_processor(source, where), whole_settings(source, where)
    videos, _ = video_settings(source, where)
    whole.pop("chat_template", None)  # stored in a separate file
    has_videos = videos != images
    if sizes_differ(ready, options, tokenizer, source):
        images = images | _image_sizes(options.tiling, images)
        if options.video is not None:
            videos, has_videos = _video_settings(options, videos), True
    if options.value_range is not None:
        images = images | {VALUE_RANGE: options.value_range}
    for name, settings in (("image_processor", images), ("video_processor", videos)):
        if name in whole:
            whole[name] = settings
    found = {IMAGE_PROCESSOR_NAME: images, PROCESSOR_NAME: whole, VIDEO_PROCESSOR_NAME: videos if has_videos else {}}
    return {name: content for name, content in found.items() if content}


def write_image_sizes(export: ExportPlan, output_dir: Path) -> None:
    """Write the processor's files if the run prepared images differently from the source's files."""
    plan, options, source = export.model, export.image_options, export.source_folder
    if options.value_range is not None or sizes_differ(plan.architecture, options, plan.tokenizer, source):
        _write_processor(export, output_dir)


def sizes_differ(
    ready: ReadyModel, options: ReadyImageOptions, tokenizer: PreTrainedTokenizerBase, source: Path
) -> bool:
    """Return True if a run's sizes of images and videos, or its choice of frames, differ from the source's files."""
    return _sizes(options) != _sizes_in(ready, options, tokenizer, source)


def _write_processor(export: ExportPlan, output_dir: Path) -> None:
    plan, source = export.model, export.source_folder
    contents = processor_files(plan.architecture, export.image_options, plan.tokenizer, source)
    for name, content in contents.items():
        if content == read_json_if_there(source / name, str(source)):
            shutil.copy(source / name, output_dir / name)  # unchanged, byte for byte
        else:
            write_json(output_dir / name, content)


def _image_sizes(tiling: Tiling, images: dict) -> dict:
    """Return settings with a run's image size limits, also under older names if present, because they override size."""
    if not isinstance(tiling, CellTiling):
        return {}
    earlier = {"min_pixels": tiling.least, "max_pixels": tiling.most}
    size = {"shortest_edge": tiling.least, "longest_edge": tiling.most}
    return {"size": size, **{key: value for key, value in earlier.items() if key in images}}


def _sizes(options: ReadyImageOptions) -> tuple:
    """Return the sizes and frame choice that write_image_sizes would write."""
    rule = options.video
    frames = None if rule is None else (_bounds(rule.frame), options.frame_choice)
    return _bounds(options.tiling), frames


def _bounds(tiling: Tiling | FrameCells) -> tuple[int, int] | None:
    """Return the minimum and maximum number of pixels, if flags can change them."""
    return (tiling.least, tiling.most) if isinstance(tiling, (CellTiling, FrameCells)) else None


def _sizes_in(ready: ReadyModel, options: ReadyImageOptions, tokenizer: PreTrainedTokenizerBase, source: Path) -> tuple:
    """Return the same values as _sizes, but as the source folder's files define them."""
    where, tiling = str(source), options.tiling
    images = read_processor(source, where)
    if isinstance(tiling, CellTiling):
        least, most = pixel_bounds(images)
        tiling = dataclasses.replace(tiling, least=least, most=most)
    rule, _ = plan_videos(ready, tiling, images, read_whole_processor(source, where), tokenizer)
    without_flags = Arguments(ModelArguments(), DataArguments(), TrainingArguments(), frozenset())
    return _sizes(dataclasses.replace(options, tiling=tiling, video=rule, **frames_options(rule, without_flags)))


def _video_settings(options: ReadyImageOptions, source: dict) -> dict:
    """Return a run's video processor settings. source: the settings in the source folder."""
    rule, most = options.video, options.frames_upbound
    chosen = {"fps": options.video_fps, "num_frames": None, **({rule.bound: most} if most else {})}
    if options.force_sample and rule.bound != "num_frames":
        chosen = {"fps": None, "num_frames": most}
    replaced = ("min_pixels", "max_pixels", "max_frames", "video_sampling", "image_processor_type")
    kept = {name: value for name, value in source.items() if name not in replaced}
    return {"video_processor_type": rule.processor, **kept, **_size_of(rule), **chosen}


def _size_of(rule: VideoRule) -> dict[str, dict[str, int]]:
    """Return a video processor's setting for frame sizes, if flags can change it or its key may differ."""
    if isinstance(rule.frame, FrameCells):
        return {"size": {"shortest_edge": rule.frame.least, "longest_edge": rule.frame.most}}
    return {"size": {"longest_edge": rule.frame.longest_edge}} if isinstance(rule.frame, SplitTiling) else {}


def write_ready(export: ExportPlan, entries: list[Entry], output_dir: Path, *, holes: bool = False) -> Written:
    """Write the folder with one tensor in memory at a time. Returns checksums of the tensors' bits.

    holes: write weight files without weights.
    """
    source, written_entries = export.source_folder, ready_entries(export, entries)
    written = write_shards(written_entries, output_dir, export.dtype, export.max_shard_bytes, holes=holes)
    check_folder(source, str(source))
    for name in (*JSON_FILES, *OTHER_FILES):
        if name not in NOT_COPIED and (source / name).is_file():
            shutil.copy(source / name, output_dir / name)
    _write_template(export.model.tokenizer.chat_template, source, output_dir)
    _write_processor(export, output_dir)
    config = read_json(source / "config.json", str(source))
    _write_rows(config, export)
    config["dtype"] = str(export.dtype).removeprefix("torch.")
    for part in (config, *(each for each in config.values() if isinstance(each, dict))):
        for name in ("dtype", "torch_dtype"):
            if name in part:
                part[name] = config["dtype"]
    write_json(output_dir / "config.json", config | plugin_entries(export.args.mm_projector_type))
    _write_stop(export.model.tokenizer, config, output_dir)
    return written


def _write_stop(tokenizer: PreTrainedTokenizerBase, config: dict, output_dir: Path) -> None:
    """Add the id that ends an answer to eos_token_id, if missing, so that transformers' generate() stops there.

    config: the content of config.json, where generate() reads the ids if there is no generation_config.json.
    """
    file = output_dir / "generation_config.json"
    text = config["text_config"] if isinstance(config.get("text_config"), dict) else {}
    settings = {name: config.get(name, text.get(name)) for name in _GENERATION_IDS}
    if file.is_file():
        settings = read_json(file, str(output_dir))
    stops = settings.get("eos_token_id")
    stops = stops if isinstance(stops, list) else [] if stops is None else [stops]
    end = answer_end(tokenizer).id
    if end is not None and end not in stops:
        write_json(file, {**settings, "eos_token_id": [*stops, end]})


def _write_template(template: str, source: Path, output_dir: Path) -> None:
    """Write the chat template used in training, so that the folder has no other default template."""
    (output_dir / "chat_template.jinja").write_text(template, encoding="utf-8")
    for file in source.glob(f"{TEMPLATES_FOLDER}/*.jinja"):
        (output_dir / TEMPLATES_FOLDER).mkdir(exist_ok=True)
        shutil.copy(file, output_dir / TEMPLATES_FOLDER)
    file = output_dir / "tokenizer_config.json"
    config = read_json_if_there(file, str(source))
    templates = config.get("chat_template")
    if isinstance(templates, list):
        named = [one for one in templates if isinstance(one, dict) and one.get("name") != "default"]
        written: object = [{"name": "default", "template": template}, *named]
    else:
        written = template
    if templates is not None and templates != written:
        write_json(file, {**config, "chat_template": written})


def _write_rows(config: dict, export: ExportPlan) -> None:
    """Set vocab_size in the content of config.json if the number of embedding rows differs from the source's."""
    text = config["text_config"] if isinstance(config.get("text_config"), dict) else config
    own, before = export.model.text_config, export.model.architecture.config.get_text_config()
    for name in ("vocab_size", "vocab_size_per_layer_input"):
        value, old = getattr(own, name, None), getattr(before, name, None)
        if value != old:
            text[name] = value
            if name in config:
                config[name] = value
