"""The folder that transformers' Llava, LlavaNext or LlavaOnevision opens, in llava-hf's spelling."""

import dataclasses
import json
from pathlib import Path

from transformers import GenerationConfig, LlavaConfig, LlavaNextConfig, LlavaOnevisionConfig, PreTrainedTokenizerBase

from llava_ds.constants import IMAGE_TOKEN
from llava_ds.data.encode import end_markers
from llava_ds.data.templates import resolve_template
from llava_ds.export.export_plan import ExportPlan, hf_container
from llava_ds.export.llava_config import plain_config, with_old_names
from llava_ds.export.processor import VIDEO_TOKEN, hf_pinpoints, select_strategy, write_processor
from llava_ds.export.safetensors_shards import write_shards
from llava_ds.export.tensors import Entry, completed, read_entries
from llava_ds.export.tokenizer_files import hf_tokenizer, write_hf_tokenizer
from llava_ds.model.hf import HF_CLASSES

CONFIGS = {"llava": LlavaConfig, "llava_next": LlavaNextConfig, "llava_onevision": LlavaOnevisionConfig}


def hf_entries(export: ExportPlan, entries: list[Entry]) -> list[Entry]:
    """The entries that are written: llava-hf's names, rows for new tokens, and the tower's unused layers.

    A tokenizer without <image> gets it as a new last token, whose rows are the mean of the others.
    """
    tower = read_entries("vision_tower", export.model.sources.whole_tower())
    names = export.names
    return names.to_hf(names.resized(completed(entries, tower), _rows(export)[1]))


def write_hf(export: ExportPlan, entries: list[Entry], output_dir: Path, *, holes: bool = False) -> None:
    """Write the folder, one tensor in memory at a time.

    entries: of the model, by their names here. holes: files of weights without weights.
    """
    kind, _ = hf_container(export.model, export.args, export.image_options)
    assert kind is not None, "export_format would have said so"
    tokenizer, rows = _rows(export)
    write_shards(hf_entries(export, entries), output_dir, export.dtype, export.max_shard_bytes, holes=holes)
    write_processor(export, kind, tokenizer, output_dir)
    write_hf_tokenizer(tokenizer, Path(export.model.tokenizer.name_or_path), output_dir)
    _write_config(export, kind, tokenizer, rows, output_dir)
    write_generation_config(export, tokenizer, output_dir, tokenizer.pad_token_id)


def _rows(export: ExportPlan) -> tuple[PreTrainedTokenizerBase, int]:
    """The tokenizer with the tokens that its processor needs, and the rows of the embeddings."""
    kind, _ = hf_container(export.model, export.args, export.image_options)
    tokens = (IMAGE_TOKEN, VIDEO_TOKEN) if kind == "llava_onevision" else (IMAGE_TOKEN,)
    tokenizer, _ = hf_tokenizer(export.model.tokenizer, tokens)
    tokenizer.model_max_length = export.max_length
    return tokenizer, max(export.vocab_size, *(tokenizer.convert_tokens_to_ids(token) + 1 for token in tokens))


def _write_config(
    export: ExportPlan, kind: str, tokenizer: PreTrainedTokenizerBase, rows: int, output_dir: Path
) -> None:
    plan, args, image_options = export.model, export.args, export.image_options
    text_config = plain_config(plan.text_config, export.dtype)
    text_config["vocab_size"] = rows
    text_config["tie_word_embeddings"] = export.names.tied_in_hf
    own: dict[str, object] = {}
    if kind == "llava":
        own["image_seq_length"] = plan.images.num_tokens
    else:
        own["image_grid_pinpoints"] = hf_pinpoints(image_options)
    if kind == "llava_onevision":
        own["vision_aspect_ratio"] = image_options.aspect_ratio
        own["video_token_index"] = tokenizer.convert_tokens_to_ids(VIDEO_TOKEN)
    if rows != export.vocab_size:
        own["llava_ds_vocab_size"] = export.vocab_size  # for the way back, which takes the rest away
    elif export.rows is not None:
        own["llava_ds_vocab_size"] = export.rows
    if export.tower_name is not None:
        own["mm_vision_tower"] = export.tower_name
    CONFIGS[kind](
        architectures=[HF_CLASSES[kind].__name__],
        vision_config=plain_config(plan.tower.config, export.dtype),
        text_config=text_config,
        image_token_index=tokenizer.convert_tokens_to_ids(IMAGE_TOKEN),
        projector_hidden_act="gelu",
        vision_feature_select_strategy=select_strategy(export),
        vision_feature_layer=args.mm_vision_select_layer,
        multimodal_projector_bias=True,
        tie_word_embeddings=text_config["tie_word_embeddings"],
        dtype=str(export.dtype).removeprefix("torch."),
        # What transformers' classes don't know, for infer/load.py: prompts and images as in training.
        **({} if export.template is not None else {"llava_ds_version": args.version}),
        mm_use_im_start_end=args.mm_use_im_start_end,
        split_special_tokens=args.split_special_tokens,
        llava_ds_pictures=dataclasses.asdict(image_options),
        **own,
    ).save_pretrained(output_dir)
    path = output_dir / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config["torch_dtype"] = config["dtype"]
    config["text_config"] = with_old_names(config["text_config"])
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def write_generation_config(
    export: ExportPlan, tokenizer: PreTrainedTokenizerBase, output_dir: Path, pad_token_id: int | None
) -> None:
    """Write generation_config.json: an answer ends where the template ends it, or the tokenizer."""
    ends = end_markers(resolve_template(export.args.version), tokenizer)
    GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=ends[0] if len(ends) == 1 else ends,
        pad_token_id=pad_token_id,
    ).save_pretrained(output_dir)
