"""The folder that LLaVA's own loader opens, with LLaVA's names; its config.json; and the projector by itself."""

import json
from pathlib import Path

import torch
from transformers import PreTrainedConfig

from llava_ds.config.arguments import trained_parts, trains_new_rows
from llava_ds.export.bit_check import Written, sums_of
from llava_ds.export.export_plan import ExportPlan
from llava_ds.export.safetensors_shards import write_shards
from llava_ds.export.tensors import Entry, completed, read_entries, renamed
from llava_ds.export.tokenizer_files import write_generation_config, write_llava_tokenizer, write_variables
from llava_ds.extensions.active import text_part
from llava_ds.files.writing import write_file, write_tensors
from llava_ds.model.families.language import LLAVA_CLASSES
from llava_ds.model.open import names as formats


def llava_config(
    export: ExportPlan, *, max_length: int | None = None, dtype: torch.dtype | None = None
) -> dict[str, object]:
    """The language model's configuration with LLaVA's fields, and without the path that it lay at.

    For a family that LLaVA has no class for, model_type and architectures are spelled as LLaVA would.
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
        "split_special_tokens": args.split_special_tokens,  # for our own code
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
        "llava_ds_version": args.version,  # LLaVA's own code goes by the folder's name
    }


def plain_config(config: PreTrainedConfig, dtype: torch.dtype | None = None) -> dict[str, object]:
    """A part's configuration that does not tell where it lay on this machine."""
    plain = {key: value for key, value in config.to_dict().items() if key != "_name_or_path"}
    return plain if dtype is None else {**plain, "dtype": str(dtype).removeprefix("torch.")}


def with_old_names(config: dict[str, object]) -> dict[str, object]:
    """A language model's configuration in the words of transformers 4, too, which reads no rope_parameters.

    It would take the default angle for one that is not said.
    """
    config = dict(config)
    if config.get("dtype") is not None:
        config["torch_dtype"] = str(config["dtype"]).removeprefix("torch.")
    rope = config.get("rope_parameters")
    if isinstance(rope, dict) and "rope_theta" in rope:
        config["rope_theta"] = rope["rope_theta"]
        rest = {key: value for key, value in rope.items() if key != "rope_theta"}
        if rest.get("rope_type", "default") != "default":
            config["rope_scaling"] = {**rest, "type": rest["rope_type"]}
    return config


PROJECTOR_FILES = ("mm_projector.bin", "mm_projector.safetensors", "config.json")


def llava_entries(export: ExportPlan, entries: list[Entry]) -> list[Entry]:
    """The entries that are written: LLaVA's names, no rows that an export had added, and the whole tower."""
    tower = read_entries("vision_tower", export.model.sources.whole_tower())
    whole = export.names.resized(completed(entries, tower), export.rows or export.vocab_size)
    return renamed(export.names.divided(whole), lambda name: formats.to_llava(name, export.args.mm_projector_type))


def write_llava(export: ExportPlan, entries: list[Entry], output_dir: Path, *, holes: bool = False) -> Written:
    """Write the folder, one tensor in memory at a time, and return the sums of their bits; holes: files of weights
    without weights."""
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
    if export.template is not None:  # of another's processor, for the way back
        config["llava_ds_chat_template"] = export.template
        del config["llava_ds_version"]
    pad_token_id = None if pad is None else tokenizer.convert_tokens_to_ids(pad)
    write_generation_config(export.args.version, tokenizer, output_dir, pad_token_id)
    (output_dir / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return written


def write_projector(export: ExportPlan, entries: list[Entry], output_dir: Path) -> Written:
    """Write PROJECTOR_FILES: the projector twice, with LLaVA's keys, and config.json with LLaVA's fields; return the
    sums of the tensors' bits.

    entries: of the model; the newline becomes model.image_newline.
    """
    kind = export.args.mm_projector_type
    written = projector_entries(export, entries)
    tensors = {formats.projector_to_llava(entry.name, kind): entry.read() for entry in written}
    paths = [output_dir / name for name in PROJECTOR_FILES]
    write_file(paths[0], lambda file: torch.save(tensors, file))
    write_tensors(paths[1], tensors)
    config = llava_config(export, max_length=export.max_length)
    paths[2].write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    sums = sums_of(tensors.items())
    return {paths[0]: sums, paths[1]: sums}


def projector_entries(export: ExportPlan, entries: list[Entry]) -> list[Entry]:
    """Select projector and newline; and the input embeddings, where the tokens around images were trained."""
    rows = export.names.embedding if trains_new_rows(export.args) else None
    return [e for e in entries if e.name.startswith((formats.PROJECTOR, formats.NEWLINE)) or e.name == rows]
