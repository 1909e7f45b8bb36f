"""The folder of a ready model: weights by the names that it came with, its configuration, its processor's files."""

import json
import shutil
from functools import partial
from pathlib import Path

import torch

from llava_ds.export.export_plan import ExportPlan
from llava_ds.export.safetensors_shards import write_shards
from llava_ds.export.tensors import Entry, completed, renamed, turned
from llava_ds.files.model_files import (
    JSON_FILES,
    OTHER_FILES,
    TEMPLATES_FOLDER,
    check_folder,
    read_json,
    read_json_if_there,
)
from llava_ds.model.families.qwen_vl import pixel_bounds
from llava_ds.model.open.ready_folder import ReadyNames, names_in_folder
from llava_ds.model.open.weights import WeightFiles
from llava_ds.model.vision import read_processor
from llava_ds.tilings import CellTiling

NOT_COPIED = ("config.json", "adapter_config.json")  # which are written, or belong to an adapter


def source_folder(export: ExportPlan) -> Path:
    """The folder that the ready model came from, or the one under its adapter."""
    return Path(export.model.sources.vision_tower.path)


def ready_entries(export: ExportPlan, entries: list[Entry]) -> list[Entry]:
    """The entries by the names that they have in the folder that the model came from, and experts turned as there.

    Behind them come what never trains, and parts that no image needs, from that folder.
    """
    names = ReadyNames(export.model.ready, export.model.text_config)
    files = WeightFiles(source_folder(export))
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
    """True if experts (E, O, I) are (E, I, O) on disk."""
    return len(shape) == 3 and shape != on_disk == (shape[0], shape[2], shape[1])


def write_image_sizes(export: ExportPlan, output_dir: Path) -> None:
    """Write the image processor's files with --min_pixels and --max_pixels, where the source's say others."""
    tiling, source = export.image_options.tiling, source_folder(export)
    if not isinstance(tiling, CellTiling):
        return
    if (tiling.least, tiling.most) == pixel_bounds(read_processor(source, str(source))):
        return
    for name in ("preprocessor_config.json", "processor_config.json"):
        content = read_json_if_there(source / name, str(source))
        images = content if name.startswith("pre") else content.get("image_processor")
        if isinstance(images, dict) and images:
            images["size"] = {"shortest_edge": tiling.least, "longest_edge": tiling.most}
            earlier = {"min_pixels": tiling.least, "max_pixels": tiling.most}  # names, which win over size
            images |= {key: value for key, value in earlier.items() if key in images}
            (output_dir / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def write_ready(export: ExportPlan, entries: list[Entry], output_dir: Path, *, holes: bool = False) -> None:
    """Write the folder, one tensor in memory at a time. holes: files of weights without weights."""
    source = source_folder(export)
    write_shards(ready_entries(export, entries), output_dir, export.dtype, export.max_shard_bytes, holes=holes)
    check_folder(source, str(source))
    for name in (*JSON_FILES, *OTHER_FILES):
        if name not in NOT_COPIED and (source / name).is_file():
            shutil.copy(source / name, output_dir / name)
    for file in source.glob(f"{TEMPLATES_FOLDER}/*.jinja"):
        (output_dir / TEMPLATES_FOLDER).mkdir(exist_ok=True)
        shutil.copy(file, output_dir / TEMPLATES_FOLDER)
    write_image_sizes(export, output_dir)
    config = read_json(source / "config.json", str(source))
    config["dtype"] = str(export.dtype).removeprefix("torch.")
    for part in (config, *(each for each in config.values() if isinstance(each, dict))):
        for name in ("dtype", "torch_dtype"):
            if name in part:
                part[name] = config["dtype"]
    (output_dir / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
