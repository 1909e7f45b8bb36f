"""The processor of an exported model: images and prompts as in training, by transformers' own code."""

import json
from pathlib import Path

from transformers import (
    CLIPImageProcessorPil,
    LlavaImageProcessorPil,
    LlavaNextImageProcessorPil,
    LlavaNextProcessor,
    LlavaOnevisionImageProcessorPil,
    LlavaProcessor,
    PreTrainedTokenizerBase,
    SiglipImageProcessorPil,
)

from llava_ds.constants import IMAGE_TOKEN
from llava_ds.data.chat_template import chat_template
from llava_ds.data.templates import resolve_template
from llava_ds.export.export_plan import ExportPlan
from llava_ds.geometry import ImageOptions

VIDEO_TOKEN = "<video>"
BICUBIC = 3  # PIL's number


def select_strategy(export: ExportPlan) -> str:
    """transformers' vision_feature_select_strategy: "default" takes the class token away, "full" leaves all."""
    tower = export.model.tower
    return "default" if tower.has_class_token and not tower.images.class_token else "full"


def hf_pinpoints(image_options: ImageOptions) -> list[list[int]]:
    """The pinpoints as transformers writes them, height first."""
    return [[height, width] for width, height in image_options.anyres_sizes]


def write_processor(export: ExportPlan, kind: str, tokenizer: PreTrainedTokenizerBase, output_dir: Path) -> None:
    """Write processor_config.json, preprocessor_config.json and the chat template for a model_type of transformers'.

    tokenizer: as the exported model has it.
    """
    plan, args = export.model, export.args
    template = export.template
    if template is None:
        template = chat_template(resolve_template(args.version), plan.tokenizer, args.mm_use_im_start_end)
    image_processor = _image_processor(export, kind)
    # transformers 5 keeps all of it in processor_config.json; earlier versions and other programs look here.
    image_processor.save_pretrained(output_dir)
    if kind == "llava_onevision":
        _write_onevision(export, template, output_dir)
        return
    (LlavaNextProcessor if kind == "llava_next" else LlavaProcessor)(
        image_processor=image_processor,
        tokenizer=tokenizer,
        patch_size=plan.tower.config.patch_size,
        vision_feature_select_strategy=select_strategy(export),
        num_additional_image_tokens=int(plan.tower.has_class_token),
        chat_template=template,
    ).save_pretrained(output_dir)


def _image_processor(export: ExportPlan, kind: str):
    spec, image_options = export.model.images, export.image_options
    square = {"height": spec.size, "width": spec.size}
    scaling = {"image_mean": list(spec.mean), "image_std": list(spec.std), "resample": BICUBIC}
    cut = {"size": {"shortest_edge": spec.size}, "crop_size": square}
    if kind == "llava_onevision":
        return LlavaOnevisionImageProcessorPil(size=square, image_grid_pinpoints=hf_pinpoints(image_options), **scaling)
    if kind == "llava_next":
        return LlavaNextImageProcessorPil(image_grid_pinpoints=hf_pinpoints(image_options), **cut, **scaling)
    if image_options.aspect_ratio == "pad":
        return LlavaImageProcessorPil(do_pad=True, **cut, **scaling)
    if spec.stretch:
        return SiglipImageProcessorPil(size=square, **scaling)
    return CLIPImageProcessorPil(**cut, **scaling)


def _write_onevision(export: ExportPlan, template: str, output_dir: Path) -> None:
    """By hand, for without torchvision transformers' class can't be made: it wants a video processor."""
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
        "size": square if spec.stretch else {"shortest_edge": spec.size},
        "crop_size": None if spec.stretch else square,
        "resample": BICUBIC,
        "rescale_factor": 1 / 255,
        "image_mean": list(spec.mean),
        "image_std": list(spec.std),
    }
    whole = {
        "image_processor": images,
        "video_processor": videos,
        "image_token": IMAGE_TOKEN,
        "video_token": VIDEO_TOKEN,
        # The class token is counted, too, where "default" takes it away again.
        "num_image_tokens": image_options.tokens_per_tile + (select_strategy(export) == "default"),
        "processor_class": "LlavaOnevisionProcessor",
        "vision_aspect_ratio": image_options.aspect_ratio,
        "vision_feature_select_strategy": select_strategy(export),
    }
    for name, content in (("processor_config.json", whole), ("video_preprocessor_config.json", videos)):
        (output_dir / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    (output_dir / "chat_template.jinja").write_text(template, encoding="utf-8")
