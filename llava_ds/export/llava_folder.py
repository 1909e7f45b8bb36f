"""The folder that LLaVA's own loader opens, in LLaVA's spelling; and the projector by itself."""

import json
from pathlib import Path

import torch

from llava_ds.config.arguments import trains_new_rows
from llava_ds.export.llava_config import llava_config
from llava_ds.export.plan import Finished
from llava_ds.export.safetensors_shards import write_shards
from llava_ds.export.tensors import Entry, completed, read_entries, renamed
from llava_ds.export.tokenizer_files import write_llava_tokenizer
from llava_ds.export.transformers_folder import write_generation_config
from llava_ds.files.writing import write_file, write_tensors
from llava_ds.model.open import names as formats

PROJECTOR_FILES = ("mm_projector.bin", "mm_projector.safetensors", "config.json")


def llava_entries(finished: Finished, entries: list[Entry]) -> list[Entry]:
    """What is written of a model's entries: LLaVA's names, no rows that an export had added, and the whole tower."""
    tower = read_entries("vision_tower", finished.plan.sources.whole_tower())
    whole = finished.names.resized(completed(entries, tower), finished.rows or finished.vocab_size)
    return renamed(whole, lambda name: formats.to_llava(name, finished.args.mm_projector_type))


def write_llava(
    finished: Finished, entries: list[Entry], output_dir: Path, max_bytes: int, *, holes: bool = False
) -> None:
    """Write the folder, one tensor in memory at a time; holes: files of weights without weights."""
    write_shards(llava_entries(finished, entries), output_dir, finished.dtype, max_bytes, holes=holes)
    tokenizer = finished.plan.tokenizer
    pad = write_llava_tokenizer(Path(tokenizer.name_or_path), output_dir, finished.max_length)
    config = llava_config(
        finished.plan, finished.args, finished.image_options, max_length=finished.max_length, dtype=finished.dtype
    )
    if finished.rows is not None:
        config["vocab_size"] = finished.rows
    if finished.tower_name is not None:
        config["mm_vision_tower"] = finished.tower_name
    if finished.template is not None:  # of another's processor, for the way back
        config["llava_ds_chat_template"] = finished.template
        del config["llava_ds_version"]
    pad_token_id = None if pad is None else tokenizer.convert_tokens_to_ids(pad)
    write_generation_config(finished, tokenizer, output_dir, pad_token_id)
    (output_dir / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def write_projector(finished: Finished, entries: list[Entry], output_dir: Path) -> list[Path]:
    """Write mm_projector.bin with LLaVA's keys, the same as .safetensors, and config.json with LLaVA's fields.

    entries: what projector_entries gives of a model's; the newline goes as model.image_newline.
    """
    kind = finished.args.mm_projector_type
    tensors = {formats.projector_to_llava(entry.name, kind): entry.read() for entry in entries}
    paths = [output_dir / name for name in PROJECTOR_FILES]
    write_file(paths[0], lambda file: torch.save(tensors, file))
    write_tensors(paths[1], tensors)
    config = llava_config(finished.plan, finished.args, finished.image_options, max_length=finished.max_length)
    paths[2].write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return paths


def projector_entries(finished: Finished, entries: list[Entry]) -> list[Entry]:
    """Those of the projector and the newline; and of the input embeddings, where tokens around pictures trained."""
    rows = finished.names.embedding if trains_new_rows(finished.args) else None
    return [e for e in entries if e.name.startswith((formats.PROJECTOR, formats.NEWLINE)) or e.name == rows]
