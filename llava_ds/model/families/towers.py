"""The vision-tower families of --vision_tower, one declaration each.

To add a family, declare it here and add its tiny folder to TOWERS in tests/helpers/toys.py; this runs all tests of
towers for it. If transformers renames its tensors on loading, map the names in model/open/names.py.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import transformers
from transformers import PreTrainedConfig, PreTrainedModel


def _one(config: PreTrainedConfig) -> int:
    return 1


@dataclass(frozen=True)
class TowerFamily:
    """A family of transformers' vision models.

    name: prefix of the class names (name + "Config", name + "Model"); patch_embedding, norm: names of the first layer
    and of the norm after the last layer; first_tokens: number of tokens before the patches (class token, registers);
    crops: the image processor crops the centre by default; any_size: the tower accepts images of any size, so the image
    processor chooses the size; any_shape: it can process images in their own shape (flex_tower.py); llavas: LLaVA's
    code has a class for it; in_hf: prefix of its tensor names in a llava-hf folder; settings: configuration values for
    training, which disable randomness and modules that would never run; mlp_width: width of the layers' MLPs; problem:
    the reason why a configuration can't be trained, or "".
    """

    name: str
    patch_embedding: str
    norm: str
    first_tokens: Callable[[PreTrainedConfig], int] = lambda config: 0
    crops: bool = False
    any_size: Callable[[PreTrainedConfig], bool] = lambda config: False
    any_shape: bool = False
    llavas: bool = False
    in_hf: str = ""
    settings: dict[str, object] = field(default_factory=dict)
    mlp_width: Callable[[PreTrainedConfig], int] = lambda config: config.intermediate_size
    problem: Callable[[PreTrainedConfig], str] = lambda config: ""

    @property
    def config(self) -> type[PreTrainedConfig]:
        """The family's configuration class."""
        return getattr(transformers, f"{self.name}Config")

    @property
    def model(self) -> type[PreTrainedModel]:
        """The family's model class. transformers imports it on first use."""
        return getattr(transformers, f"{self.name}Model")


def _with_registers(config: PreTrainedConfig) -> int:
    return 1 + config.num_register_tokens


_CLIPS = {"patch_embedding": "embeddings.patch_embedding", "norm": "post_layernorm", "in_hf": "vision_model."}
_DINOV2S = {
    "patch_embedding": "embeddings.patch_embeddings.projection", "norm": "layernorm", "crops": True,
    "any_size": lambda config: True, "mlp_width": lambda config: int(config.hidden_size * config.mlp_ratio),
    "problem": lambda config: (
        "its MLPs have gates (use_swiglu_ffn): these are not supported" if config.use_swiglu_ffn else ""
    ),
}  # fmt: skip
# Keys: model_type of the vision model's configuration.
TOWERS = {
    "clip_vision_model": TowerFamily("CLIPVision", **_CLIPS, first_tokens=_one, crops=True, llavas=True),
    "siglip_vision_model": TowerFamily("SiglipVision", **_CLIPS, llavas=True, settings={"vision_use_head": False}),
    "siglip2_vision_model": TowerFamily("Siglip2Vision", **_CLIPS, any_shape=True, settings={"vision_use_head": False}),
    "dinov2": TowerFamily("Dinov2", **_DINOV2S, first_tokens=_one),
    "dinov2_with_registers": TowerFamily("Dinov2WithRegisters", **_DINOV2S, first_tokens=_with_registers),
    "dinov3_vit": TowerFamily(
        "DINOv3ViT",
        patch_embedding="embeddings.patch_embeddings",
        norm="norm",
        first_tokens=_with_registers,
        any_size=lambda config: True,
        # These shift positions at random, and are for pretraining only.
        settings=dict.fromkeys(("pos_embed_shift", "pos_embed_jitter", "pos_embed_rescale")),
    ),
    "aimv2_vision_model": TowerFamily(
        "Aimv2Vision",
        patch_embedding="embeddings.patch_embed",
        norm="rms_norm",
        crops=True,
        any_size=lambda config: config.is_native,
        settings={"use_head": False},
    ),
    "internvl_vision": TowerFamily(
        "InternVLVision",
        patch_embedding="embeddings.patch_embeddings.projection",
        norm="layernorm",
        first_tokens=_one,
        any_size=lambda config: True,
    ),
}
# Image-text models, of which only the vision model is used: model_type of the whole, and of the vision model.
PAIRS = {
    "clip": "clip_vision_model",
    "siglip": "siglip_vision_model",
    "siglip2": "siglip2_vision_model",
    "aimv2": "aimv2_vision_model",
}


def tower_family(config: PreTrainedConfig) -> TowerFamily:
    """Return the family of a tower's configuration."""
    return TOWERS[config.model_type]
