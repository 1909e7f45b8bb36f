"""The folder that LLaVA's own loader opens, in LLaVA's spelling; and the projector by itself."""

import json
from pathlib import Path

import torch

from llava_ds.config.arguments import trains_new_rows
from llava_ds.export.export_plan import ExportPlan
from llava_ds.export.llava_config import llava_config
from llava_ds.export.safetensors_shards import write_shards
from llava_ds.export.tensors import Entry, completed, read_entries, renamed
from llava_ds.export.tokenizer_files import write_llava_tokenizer
from llava_ds.export.transformers_folder import write_generation_config
from llava_ds.files.writing import write_file, write_tensors
from llava_ds.model.open import names as formats

PROJECTOR_FILES = ("mm_projector.bin", "mm_projector.safetensors", "config.json")


def llava_entries(export: ExportPlan, entries: list[Entry]) -> list[Entry]:
    """The entries that are written: LLaVA's names, no rows that an export had added, and the whole tower."""
    tower = read_entries("vision_tower", export.model.sources.whole_tower())
    whole = export.names.resized(completed(entries, tower), export.rows or export.vocab_size)
    return renamed(whole, lambda name: formats.to_llava(name, export.args.mm_projector_type))


def write_llava(export: ExportPlan, entries: list[Entry], output_dir: Path, *, holes: bool = False) -> None:
    """Write the folder, one tensor in memory at a time; holes: files of weights without weights."""
    write_shards(llava_entries(export, entries), output_dir, export.dtype, export.max_shard_bytes, holes=holes)
    tokenizer = export.model.tokenizer
    pad = write_llava_tokenizer(Path(tokenizer.name_or_path), output_dir, export.max_length)
    config = llava_config(
        export.model, export.args, export.image_options, max_length=export.max_length, dtype=export.dtype
    )
    if export.rows is not None:
        config["vocab_size"] = export.rows
    if export.tower_name is not None:
        config["mm_vision_tower"] = export.tower_name
    if export.template is not None:  # of another's processor, for the way back
        config["llava_ds_chat_template"] = export.template
        del config["llava_ds_version"]
    pad_token_id = None if pad is None else tokenizer.convert_tokens_to_ids(pad)
    write_generation_config(export, tokenizer, output_dir, pad_token_id)
    (output_dir / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def write_projector(export: ExportPlan, entries: list[Entry], output_dir: Path) -> None:
    """Write PROJECTOR_FILES: the projector twice, with LLaVA's keys, and config.json with LLaVA's fields.

    entries: of the model; the newline becomes model.image_newline.
    """
    kind = export.args.mm_projector_type
    written = projector_entries(export, entries)
    tensors = {formats.projector_to_llava(entry.name, kind): entry.read() for entry in written}
    paths = [output_dir / name for name in PROJECTOR_FILES]
    write_file(paths[0], lambda file: torch.save(tensors, file))
    write_tensors(paths[1], tensors)
    config = llava_config(export.model, export.args, export.image_options, max_length=export.max_length)
    paths[2].write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def projector_entries(export: ExportPlan, entries: list[Entry]) -> list[Entry]:
    """Select projector and newline; and the input embeddings, where the tokens around images were trained."""
    rows = export.names.embedding if trains_new_rows(export.args) else None
    return [e for e in entries if e.name.startswith((formats.PROJECTOR, formats.NEWLINE)) or e.name == rows]
