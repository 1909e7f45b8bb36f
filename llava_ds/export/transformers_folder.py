"""Write a folder for transformers' Llava, LlavaNext or LlavaOnevision: weights, configuration and processor."""

import dataclasses
import json
from functools import partial
from pathlib import Path

import torch
from transformers import (
    CLIPImageProcessorPil,
    LlavaConfig,
    LlavaImageProcessorPil,
    LlavaNextConfig,
    LlavaNextImageProcessorPil,
    LlavaNextProcessor,
    LlavaOnevisionConfig,
    LlavaOnevisionImageProcessorPil,
    LlavaProcessor,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
    SiglipImageProcessorPil,
)

from llava_ds.constants import IMAGE_TOKEN
from llava_ds.data.jinja_templates import chat_template
from llava_ds.data.templates import resolve_template
from llava_ds.export.bit_check import Written
from llava_ds.export.export_plan import ExportPlan, hf_container, own_vision
from llava_ds.export.safetensors_shards import write_shards
from llava_ds.export.tensors import Entry, completed, read_entries, renamed
from llava_ds.export.tokenizer_files import VIDEO_TOKEN, hf_tokenizer, write_generation_config, write_hf_tokenizer
from llava_ds.extensions.active import plugin_entries, text_part
from llava_ds.geometry import ImageOptions
from llava_ds.model.families.towers import TOWERS
from llava_ds.model.open import names as formats
from llava_ds.model.open.hf import HF_CLASSES

CONFIGS = {"llava": LlavaConfig, "llava_next": LlavaNextConfig, "llava_onevision": LlavaOnevisionConfig}


def plain_config(config: PreTrainedConfig, dtype: torch.dtype | None = None) -> dict[str, object]:
    """Return a model part's configuration as a dict, without its local path."""
    plain = {key: value for key, value in config.to_dict().items() if key != "_name_or_path"}
    return plain if dtype is None else {**plain, "dtype": str(dtype).removeprefix("torch.")}


def with_old_names(config: dict[str, object]) -> dict[str, object]:
    """Add transformers 4's names to a language model's configuration.

    transformers 4 does not read rope_parameters, and would use the default rope_theta.
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


def hf_entries(export: ExportPlan, entries: list[Entry]) -> list[Entry]:
    """Return the entries to write: under llava-hf's names, with rows for new tokens and the tower's unused layers.

    If the tokenizer lacks <image>, its rows are added as the mean of the other rows. The architecture of an extension
    lists its own entries.
    """
    if export.model.architecture is not None:
        return export.model.architecture.entries(export, entries)
    tower = read_entries("vision_tower", export.model.sources.whole_tower())
    names = export.names
    kind = export.model.tower.config.model_type
    rename = partial(formats.to_hf, tower=kind, in_hf=TOWERS[kind].in_hf)
    if own_vision(export.model, export.args, export.image_options):
        rename = formats.to_own_parts
    whole = names.resized(completed(entries, tower), tokenizer_and_rows(export)[1])
    written, text = names.divided(names.to_hf(whole, rename)), export.model.text_config
    return renamed(written, partial(text_part(text).name_in_transformers, config=text))


def write_hf(export: ExportPlan, entries: list[Entry], output_dir: Path, *, holes: bool = False) -> Written:
    """Write the folder with one tensor in memory at a time, and return checksums of the tensors' bits.

    entries: the model's tensors under this project's names. holes: True to write weight files with holes. If own_vision
    finds no class, only this process can open the folder, by inserting this project's modules into a class.
    """
    if export.model.architecture is not None:
        return export.model.architecture.write(export, entries, output_dir, holes)
    kind = hf_container(export.model, export.image_options)
    tokenizer, rows = tokenizer_and_rows(export)
    written = write_shards(hf_entries(export, entries), output_dir, export.dtype, export.max_shard_bytes, holes=holes)
    # Set the template here, because the tokenizer's files are written last and would overwrite it.
    tokenizer.chat_template = write_processor(export, kind, tokenizer, output_dir)
    write_hf_tokenizer(tokenizer, Path(export.model.tokenizer.name_or_path), output_dir)
    _write_config(export, kind, tokenizer, rows, output_dir)
    write_generation_config(export.args.version, tokenizer, output_dir, tokenizer.pad_token_id)
    return written


def tokenizer_and_rows(export: ExportPlan) -> tuple[PreTrainedTokenizerBase, int]:
    """Return the tokenizer with the tokens that its processor needs, and the number of embedding rows."""
    kind = hf_container(export.model, export.image_options)
    tokens = (IMAGE_TOKEN, VIDEO_TOKEN) if kind == "llava_onevision" else (IMAGE_TOKEN,)
    tokenizer, _ = hf_tokenizer(export.model.tokenizer, tokens, export.template is None)
    tokenizer.model_max_length = export.max_length
    rows = max(export.vocab_size, *(tokenizer.convert_tokens_to_ids(token) + 1 for token in tokens))
    multiple = export.args.pad_embeddings_to_multiple_of or 1
    return tokenizer, -(-rows // multiple) * multiple


def _write_config(
    export: ExportPlan, kind: str, tokenizer: PreTrainedTokenizerBase, rows: int, output_dir: Path
) -> None:
    plan, args, image_options = export.model, export.args, export.image_options
    text = text_part(plan.text_config).in_transformers(plan.text_config)[0]
    text_config = plain_config(text or plan.text_config, export.dtype)
    text_config["vocab_size"] = rows
    text_config["tie_word_embeddings"] = export.names.tied_in_hf
    own = plugin_entries(args.mm_projector_type)
    if kind == "llava":
        own["image_seq_length"] = plan.images.num_tokens
    else:
        own["image_grid_pinpoints"] = hf_pinpoints(image_options)
    if kind == "llava_onevision":
        own["vision_aspect_ratio"] = image_options.aspect_ratio
        own["video_token_index"] = tokenizer.convert_tokens_to_ids(VIDEO_TOKEN)
    if rows != export.vocab_size:
        own["llava_ds_vocab_size"] = export.vocab_size  # lets a conversion back drop the added rows
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
        # Only infer/load.py reads the following keys, to prepare prompts and images as in training.
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


def select_strategy(export: ExportPlan) -> str:
    """Return transformers' vision_feature_select_strategy: "default" drops the class token, "full" keeps it."""
    tower = export.model.tower
    return "default" if tower.num_first_tokens and not tower.images.class_token else "full"


def hf_pinpoints(image_options: ImageOptions) -> list[list[int]]:
    """Return the pinpoints as transformers' [height, width]."""
    return [[height, width] for width, height in image_options.anyres_sizes]


def write_processor(export: ExportPlan, kind: str, tokenizer: PreTrainedTokenizerBase, output_dir: Path) -> str:
    """Write processor_config.json, preprocessor_config.json and the chat template. Returns the template.

    kind: model_type in transformers; tokenizer: the exported model's tokenizer.
    """
    plan, args = export.model, export.args
    template = export.template
    if template is None:
        template = chat_template(resolve_template(args.version), plan.tokenizer, args.mm_use_im_start_end)
    image_processor = _image_processor(export, kind)
    # transformers 5 writes everything to processor_config.json; earlier versions and other programs read
    # preprocessor_config.json.
    image_processor.save_pretrained(output_dir)
    if kind == "llava_onevision":
        _write_onevision(export, template, output_dir)
        return template
    (LlavaNextProcessor if kind == "llava_next" else LlavaProcessor)(
        image_processor=image_processor,
        tokenizer=tokenizer,
        patch_size=plan.tower.patch_size,
        vision_feature_select_strategy=select_strategy(export),
        num_additional_image_tokens=plan.tower.num_first_tokens,
        chat_template=template,
    ).save_pretrained(output_dir)
    return template


def _image_processor(export: ExportPlan, kind: str):
    spec, image_options = export.model.images, export.image_options
    square = {"height": spec.size, "width": spec.size}
    scaling = {"image_mean": list(spec.mean), "image_std": list(spec.std), "resample": spec.resample}
    cut = {"size": {"shortest_edge": spec.size}, "crop_size": square}
    if kind == "llava_onevision":
        return LlavaOnevisionImageProcessorPil(size=square, image_grid_pinpoints=hf_pinpoints(image_options), **scaling)
    if kind == "llava_next":
        return LlavaNextImageProcessorPil(image_grid_pinpoints=hf_pinpoints(image_options), **cut, **scaling)
    if image_options.aspect_ratio == "pad":
        return LlavaImageProcessorPil(do_pad=True, **cut, **scaling)
    if spec.stretch:
        return SiglipImageProcessorPil(size=square, **scaling)
    return CLIPImageProcessorPil(size={"shortest_edge": image_options.scaled_side}, crop_size=square, **scaling)


def _write_onevision(export: ExportPlan, template: str, output_dir: Path) -> None:
    """Write LlavaOnevision's files without transformers' class, whose video processor needs torchvision."""
    spec, image_options = export.model.images, export.image_options
    images = json.loads((output_dir / "preprocessor_config.json").read_text(encoding="utf-8"))
    square = {"height": spec.size, "width": spec.size}
    videos = {
        "video_processor_type": "LlavaOnevisionVideoProcessor",
        "do_resize": True,
        "do_rescale": True,
        "do_normalize": True,
        "do_convert_rgb": True,
        "do_center_crop": not spec.stretch,
        "size": square if spec.stretch else {"shortest_edge": image_options.scaled_side},
        "crop_size": None if spec.stretch else square,
        "resample": spec.resample,
        "rescale_factor": 1 / 255,
        "image_mean": list(spec.mean),
        "image_std": list(spec.std),
    }
    whole = {
        "image_processor": images,
        "video_processor": videos,
        "image_token": IMAGE_TOKEN,
        "video_token": VIDEO_TOKEN,
        # transformers counts the class token even if "default" drops it.
        "num_image_tokens": image_options.tokens_per_tile + (select_strategy(export) == "default"),
        "processor_class": "LlavaOnevisionProcessor",
        "vision_aspect_ratio": image_options.aspect_ratio,
        "vision_feature_select_strategy": select_strategy(export),
    }
    for name, content in (("processor_config.json", whole), ("video_preprocessor_config.json", videos)):
        (output_dir / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    (output_dir / "chat_template.jinja").write_text(template, encoding="utf-8")
