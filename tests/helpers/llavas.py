"""The same random LLaVA written in every format and spelling that --model_name_or_path takes."""

import json
import shutil
from pathlib import Path

import torch
import toys
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    CLIPVisionConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaNextConfig,
    LlavaNextForConditionalGeneration,
    LlavaOnevisionConfig,
    LlavaOnevisionForConditionalGeneration,
    SiglipVisionConfig,
    SiglipVisionModel,
)

from llava_ds.config.arguments import Arguments, DataArguments, ModelArguments, TrainingArguments
from llava_ds.engine.construct import build_model
from llava_ds.model.open.folder import take_from_model
from llava_ds.model.open.model_plan import plan_model
from llava_ds.runtime.ranks import Ranks

RANKS = Ranks(0, 0, 1, torch.device("cpu"))
STAGE_0 = {"zero_optimization": {"stage": 0}}
SIGLIP = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2}
NEXT_PINPOINTS = [[24, 48], [48, 24], [48, 48]]  # height first


def write_siglip(folder: Path) -> str:
    """A random SigLIP tower with its image processor."""
    torch.manual_seed(5)
    size = toys.IMAGE_SIZE
    SiglipVisionModel(SiglipVisionConfig(image_size=size, patch_size=toys.PATCH_SIZE, **SIGLIP)).save_pretrained(folder)
    settings = {
        "image_processor_type": "SiglipImageProcessor", "size": {"height": size, "width": size},
        "image_mean": [0.5] * 3, "image_std": [0.5] * 3, "do_resize": True, "do_normalize": True, "do_rescale": True,
    }  # fmt: skip
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    return str(folder)


def hf_model(base: dict[str, str], kind: str = "llava"):
    """transformers' own model over a base's language model and tower, with a random projector, float32."""
    torch.manual_seed(7)
    text = AutoModelForCausalLM.from_pretrained(base["model_name_or_path"])
    vision = json.loads((Path(base["vision_tower"]) / "config.json").read_text())
    siglip = vision["model_type"] == "siglip_vision_model"
    vision_config = (SiglipVisionConfig if siglip else CLIPVisionConfig).from_dict(vision)
    config_class, model_class = {
        "llava": (LlavaConfig, LlavaForConditionalGeneration),
        "llava_next": (LlavaNextConfig, LlavaNextForConditionalGeneration),
        "llava_onevision": (LlavaOnevisionConfig, LlavaOnevisionForConditionalGeneration),
    }[kind]
    more = {} if kind == "llava" else {"image_grid_pinpoints": NEXT_PINPOINTS}
    config = config_class(
        vision_config=vision_config.to_dict(),
        text_config=text.config.to_dict(),
        image_token_index=3,
        projector_hidden_act="gelu",
        vision_feature_layer=-1 if siglip else -2,
        vision_feature_select_strategy="full" if siglip else "default",
        tie_word_embeddings=text.config.tie_word_embeddings,
        **more,
    )
    model = model_class(config).eval()
    model.model.language_model.load_state_dict(text.model.state_dict())
    model.lm_head.load_state_dict(text.lm_head.state_dict())
    tower = load_file(Path(base["vision_tower"]) / "model.safetensors")
    tower = {name.removeprefix("vision_model."): tensor for name, tensor in tower.items()}
    prefix = (
        "vision_model." if any(n.startswith("vision_model.") for n in model.model.vision_tower.state_dict()) else ""
    )
    model.model.vision_tower.load_state_dict({prefix + name: tensor for name, tensor in tower.items()})
    return model


def tensors_of(model) -> dict[str, torch.Tensor]:
    """By transformers 5's names; a tied weight once."""
    shared = {name: p.detach().clone() for name, p in model.named_parameters()}
    return {name.replace("vision_tower.vision_model.", "vision_tower."): tensor for name, tensor in shared.items()}


def old_names(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """In transformers 4's spelling, as in llava-hf's folders."""
    renamed = {}
    for name, tensor in tensors.items():
        name = name.removeprefix("model.")
        if name.startswith("lm_head."):
            name = f"language_model.{name}"
        elif name.startswith("language_model."):
            name = name.replace("language_model.", "language_model.model.", 1)
        renamed[name.replace("vision_tower.", "vision_tower.vision_model.", 1)] = tensor
    return renamed


def llava_names(tensors: dict[str, torch.Tensor], with_tower: bool = True) -> dict[str, torch.Tensor]:
    """In LLaVA's spelling."""
    renamed = {}
    for name, tensor in tensors.items():
        if name.startswith("model.vision_tower."):
            if with_tower:
                rest = name.removeprefix("model.vision_tower.")
                renamed[f"model.vision_tower.vision_tower.vision_model.{rest}"] = tensor
        elif name.startswith("model.multi_modal_projector.linear_"):
            layer, kind = name.removeprefix("model.multi_modal_projector.linear_").split(".")
            renamed[f"model.mm_projector.{ {'1': 0, '2': 2}[layer] }.{kind}"] = tensor
        else:
            renamed[name.replace("model.language_model.", "model.", 1)] = tensor
    return renamed


def write_tensors(
    folder: Path, tensors: dict[str, torch.Tensor], suffix: str = ".safetensors", shards: int = 1
) -> None:
    """Weights whole or in shards with an index, as safetensors or pickles."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.clone().contiguous() for name, tensor in tensors.items()}
    stem = "model" if suffix == ".safetensors" else "pytorch_model"

    def write(path: Path, some: dict[str, torch.Tensor]) -> None:
        save_file(some, path, metadata={"format": "pt"}) if suffix == ".safetensors" else torch.save(some, path)

    if shards == 1:
        write(folder / f"{stem}{suffix}", tensors)
        return
    names = sorted(tensors)
    weight_map = {}
    for i in range(shards):
        file = f"{stem}-{i + 1:05d}-of-{shards:05d}{suffix}"
        mine = names[i::shards]
        write(folder / file, {name: tensors[name] for name in mine})
        weight_map |= dict.fromkeys(mine, file)
    (folder / f"{stem}{suffix}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def copy_tokenizer(base: dict[str, str], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for file in Path(base["model_name_or_path"]).glob("*token*"):
        shutil.copy(file, folder)


def write_hf(folder: Path, base: dict[str, str], model, old: bool = False, **weights) -> dict[str, str]:
    """A folder in transformers' format; returns the flags that name it."""
    copy_tokenizer(base, folder)
    model.config.save_pretrained(folder)
    shutil.copy(Path(base["vision_tower"]) / "preprocessor_config.json", folder)
    tensors = tensors_of(model)
    write_tensors(folder, old_names(tensors) if old else tensors, **weights)
    return {"model_name_or_path": str(folder)}


def llava_config(base: dict[str, str], model_type: str = "llava_llama", **more: object) -> dict[str, object]:
    """A config.json in LLaVA's format."""
    config = json.loads((Path(base["model_name_or_path"]) / "config.json").read_text())
    vision = json.loads((Path(base["vision_tower"]) / "config.json").read_text())
    return {
        **config,
        "model_type": model_type,
        "architectures": ["LlavaLlamaForCausalLM"],
        "mm_vision_tower": "openai/clip-vit-large-patch14-336",
        "mm_hidden_size": vision["hidden_size"],
        "mm_projector_type": "mlp2x_gelu",
        "mm_vision_select_layer": -2,
        "mm_vision_select_feature": "patch",
        "mm_use_im_start_end": False,
        "mm_use_im_patch_token": False,
        "mm_resampler_type": None,
        "image_aspect_ratio": "pad",
        "image_grid_pinpoints": None,
        "use_mm_proj": True,
        "tune_mm_mlp_adapter": False,
        "freeze_mm_mlp_adapter": False,
        "tokenizer_model_max_length": 2048,
        "tokenizer_padding_side": "right",
        **more,
    }


def write_llava(
    folder: Path,
    base: dict[str, str],
    model,
    config: dict[str, object] | None = None,
    with_tower: bool = True,
    **weights,
) -> dict[str, str]:
    """A folder in LLaVA's format; returns the flags that name it and the tower."""
    copy_tokenizer(base, folder)
    (folder / "config.json").write_text(json.dumps(config or llava_config(base)))
    write_tensors(folder, llava_names(tensors_of(model), with_tower), **weights)
    return {"model_name_or_path": str(folder), "vision_tower": base["vision_tower"]}


def arguments(given: dict[str, object]) -> Arguments:
    """Flags as a command line gives them."""
    args = Arguments(ModelArguments(), DataArguments(), TrainingArguments(), frozenset(given))
    return args.replaced(**given)


def opened(given: dict[str, object]):
    """Return (model, plan, flags) for a command line."""
    args, _ = take_from_model(arguments(given))
    plan = plan_model(args.model, 512)
    return build_model(plan, args.model, STAGE_0, torch.float32, 0, RANKS), plan, args


def write_idle_adapter(folder: Path, base: dict[str, str], projector: dict[str, torch.Tensor]) -> dict[str, object]:
    """LoRA that changes nothing, in the files that LLaVA's runs leave; returns the flags that name it and its base."""
    folder.mkdir(parents=True)
    layer = "base_model.model.model.layers.1.self_attn.q_proj"
    adapter = {f"{layer}.lora_A.weight": torch.ones(2, 32), f"{layer}.lora_B.weight": torch.zeros(32, 2)}
    save_file(adapter, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "base_model_name_or_path": base["model_name_or_path"]}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text(json.dumps(llava_config(base)))
    beside = {f"base_model.model.{name}": tensor for name, tensor in projector.items()}
    torch.save(beside, folder / "non_lora_trainables.bin")
    return {"model_name_or_path": str(folder), "vision_tower": base["vision_tower"]}
