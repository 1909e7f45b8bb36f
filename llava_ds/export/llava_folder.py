"""Write a folder that LLaVA's own code loads: weights under LLaVA's names, config.json, and the projector file."""

import json
from pathlib import Path

import torch

from llava_ds.config.arguments import trained_parts, trains_new_rows
from llava_ds.export.bit_check import Written, sums_of
from llava_ds.export.export_plan import ExportPlan
from llava_ds.export.safetensors_shards import write_shards
from llava_ds.export.tensors import Entry, completed, read_entries, renamed
from llava_ds.export.tokenizer_files import write_generation_config, write_llava_tokenizer, write_variables
from llava_ds.export.transformers_folder import plain_config, with_old_names
from llava_ds.extensions.active import plugin_entries, text_part
from llava_ds.files.writing import write_file, write_tensors
from llava_ds.model.families.language import LLAVA_CLASSES
from llava_ds.model.open import names as formats


def llava_config(
    export: ExportPlan, *, max_length: int | None = None, dtype: torch.dtype | None = None
) -> dict[str, object]:
    """Return config.json's content: the language model's configuration and LLaVA's fields, without local paths.

    If LLaVA has no class for the model's family, model_type and architectures are named by LLaVA's pattern.
    """
    plan, args, image_options = export.model, export.args, export.image_options
    family = plan.text_config.model_type
    architecture = (plan.text_config.architectures or [f"{family.title()}ForCausalLM"])[0]
    model_type, architecture = LLAVA_CLASSES.get(family, (f"llava_{family}", f"Llava{architecture}"))
    model_type, architecture = text_part(plan.text_config).llava_class(model_type, architecture, plan.text_config)
    own = {} if max_length is None else {"tokenizer_model_max_length": max_length}
    return {
        **with_old_names(plain_config(plan.text_config, dtype)),
        **own,
        "model_type": model_type,
        "architectures": [architecture],
        "mm_vision_tower": args.vision_tower,
        "mm_hidden_size": plan.tower.width,
        "mm_projector_type": args.mm_projector_type,
        "mm_vision_select_layer": args.mm_vision_select_layer,
        "mm_vision_select_feature": args.mm_vision_select_feature,
        "mm_use_im_start_end": args.mm_use_im_start_end,
        "mm_use_im_patch_token": args.mm_use_im_patch_token,
        "split_special_tokens": args.split_special_tokens,  # only this project reads it
        "mm_patch_merge_type": image_options.merge_type,
        "mm_newline_position": image_options.newline_position,
        "mm_spatial_pool_stride": image_options.pool_stride,
        "mm_spatial_pool_mode": image_options.pool_mode,
        "image_aspect_ratio": image_options.aspect_ratio,
        **({} if image_options.value_range is None else {"image_value_range": image_options.value_range}),
        "image_grid_pinpoints": [list(size) for size in image_options.pinpoints] or None,
        "mm_native_resolution": args.mm_native_resolution,
        "s2": args.s2,
        "s2_scales": args.s2_scales,
        "tokenizer_padding_side": "right",
        "use_mm_proj": True,
        "tune_mm_mlp_adapter": args.tune_mm_mlp_adapter,
        "freeze_mm_mlp_adapter": args.freeze_mm_mlp_adapter,
        "unfreeze_mm_vision_tower": "vision_tower" in trained_parts(args),
        "llava_ds_version": args.version,  # only this project reads it; LLaVA's code chooses by the folder's name
        **plugin_entries(args.mm_projector_type),
    }


def llava_entries(export: ExportPlan, entries: list[Entry]) -> list[Entry]:
    """Return the entries to write, under LLaVA's names, with the complete tower and without rows an export added."""
    tower = read_entries("vision_tower", export.model.sources.whole_tower())
    whole = export.names.resized(completed(entries, tower), export.rows or export.vocab_size)
    return renamed(export.names.divided(whole), lambda name: formats.to_llava(name, export.args.mm_projector_type))


def write_llava(export: ExportPlan, entries: list[Entry], output_dir: Path, *, holes: bool = False) -> Written:
    """Write the folder with one tensor in memory at a time, and return checksums of the tensors' bits.

    holes: True to write weight files with holes instead of weights.
    """
    written = write_shards(
        llava_entries(export, entries), output_dir, export.dtype, export.max_shard_bytes, holes=holes
    )
    tokenizer = export.model.tokenizer
    pad = write_llava_tokenizer(Path(tokenizer.name_or_path), output_dir, export.max_length)
    if export.uses_own_template:
        write_variables(export.model.tokenizer, output_dir)
    config = llava_config(export, max_length=export.max_length, dtype=export.dtype)
    if export.rows is not None:
        config["vocab_size"] = export.rows
    if export.tower_name is not None:
        config["mm_vision_tower"] = export.tower_name
    if export.template is not None:  # the template of another project's processor, for converting back
        config["llava_ds_chat_template"] = export.template
        del config["llava_ds_version"]
    pad_token_id = None if pad is None else tokenizer.convert_tokens_to_ids(pad)
    write_generation_config(export.args.version, tokenizer, output_dir, pad_token_id)
    (output_dir / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return written


def write_projector(export: ExportPlan, entries: list[Entry], output_dir: Path) -> Written:
    """Write names.PROJECTOR_FILES, and return checksums of the tensors' bits.

    The files are the projector under LLaVA's keys, as torch and as safetensors file, and config.json with LLaVA's
    fields. entries: the model's tensors. The newline is stored as model.image_newline.
    """
    kind = export.args.mm_projector_type
    written = projector_entries(export, entries)
    tensors = {formats.projector_to_llava(entry.name, kind): entry.read() for entry in written}
    paths = [output_dir / name for name in formats.PROJECTOR_FILES]
    write_file(paths[0], lambda file: torch.save(tensors, file))
    write_tensors(paths[1], tensors)
    config = llava_config(export, max_length=export.max_length)
    paths[2].write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    sums = sums_of(tensors.items())
    return {paths[0]: sums, paths[1]: sums}


def projector_entries(export: ExportPlan, entries: list[Entry]) -> list[Entry]:
    """Select the projector, the newline, and the input embeddings if rows of new image tokens were trained."""
    rows = export.names.embedding if trains_new_rows(export.args) else None
    return [e for e in entries if e.name.startswith((formats.PROJECTOR, formats.NEWLINE)) or e.name == rows]
