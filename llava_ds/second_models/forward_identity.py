"""Identify a second model's forward pass without its weights, to reuse its results on disk only if they are valid."""

import json

from llava_ds.config.arguments import ModelArguments
from llava_ds.data.fingerprint import digest_of, versions_of
from llava_ds.geometry import ImageOptions
from llava_ds.model.open.model_plan import ModelPlan

# Flags that name folders are not compared, because the folders' weights and configurations are.
FOLDER_FLAGS = ("model_name_or_path", "model_base", "vision_tower", "pretrain_mm_mlp_adapter", "lora_weight_path")
# Libraries whose versions may change the results of a forward pass.
LIBRARIES = ("torch", "transformers", "peft", "bitsandbytes", "flash-attn", "flash-attn-3")


def forward_digest(plan: ModelPlan, args: ModelArguments, images: ImageOptions) -> str:
    """Return a digest of everything that a model's forward pass depends on, except its weights.

    It covers the configurations (rope_theta), the flags (lora_alpha, bits), the image options and the libraries'
    versions. It also covers flags that only choose trained parts, so changing one causes an unnecessary pass.
    """
    configs = [plan.text_config, plan.tower.config, *([plan.architecture.config] if plan.architecture else [])]
    tower = getattr(plan.tower, "second", None)
    while tower is not None:
        configs, tower = [*configs, tower.config], tower.second
    values = (pair for section in (args, *args.own.values()) for pair in vars(section).items())
    flags = {name: value for name, value in values if name not in (*FOLDER_FLAGS, "own")}
    return digest_of(
        [
            *(json.dumps(_without_places(config.to_dict()), sort_keys=True, default=str) for config in configs),
            json.dumps(flags, sort_keys=True, default=str),
            repr(plan.images),
            repr(images),
            *versions_of(LIBRARIES),
        ]
    )


def _without_places(config: object) -> object:
    """Return a configuration without the keys for its folder and transformers version, at any depth."""
    if not isinstance(config, dict):
        return config
    return {
        name: _without_places(value)
        for name, value in config.items()
        if name not in ("_name_or_path", "transformers_version")
    }
