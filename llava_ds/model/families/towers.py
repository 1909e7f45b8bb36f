"""The families of vision towers that --vision_tower takes, one declaration each: all that differs between them.

To add one: declare it here, and add its tiny folder to TOWERS in tests/helpers/toys.py; all tests of towers then run
for it. Names of its tensors that differ between disk and memory are in model/open/names.py.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import transformers
from transformers import PreTrainedConfig, PreTrainedModel


def _one(config: PreTrainedConfig) -> int:
    return 1


def _none(config: PreTrainedConfig) -> int:
    return 0


@dataclass(frozen=True)
class TowerFamily:
    """A family of vision models of transformers'.

    name: what the names of its classes begin with, Config and Model behind it; patch_embedding: its first layer, and
    norm: the one behind the last layer, by name; first_tokens: how many come before the patches: a class token, and
    registers behind it; crops: its image processor crops the centre where it does not say otherwise; any_size: it takes
    images of any size, so that the image processor's counts; any_shape: it may see images in their own shape
    (flex_tower.py); llavas: LLaVA's own code has a class for it; in_hf: what is before its tensors' names in a llava-hf
    folder; settings: of its configuration, in training: parts that would never run, and chance, are off; mlp_width:
    width of the MLPs in its layers; problem: why such a configuration can't be trained, "" if it can.
    """

    name: str
    patch_embedding: str
    norm: str
    first_tokens: Callable[[PreTrainedConfig], int] = _none
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
        """The class of its configuration."""
        return getattr(transformers, f"{self.name}Config")

    @property
    def model(self) -> type[PreTrainedModel]:
        """The class of the model, whose file transformers imports when it is asked for."""
        return getattr(transformers, f"{self.name}Model")


def _with_registers(config: PreTrainedConfig) -> int:
    return 1 + config.num_register_tokens


def _dinos_mlp(config: PreTrainedConfig) -> int:
    return int(config.hidden_size * config.mlp_ratio)


def _dinos_problem(config: PreTrainedConfig) -> str:
    return "its MLPs have gates (use_swiglu_ffn), which are not supported" if config.use_swiglu_ffn else ""


_CLIPS = {"patch_embedding": "embeddings.patch_embedding", "norm": "post_layernorm", "in_hf": "vision_model."}
_DINOV2S = {
    "patch_embedding": "embeddings.patch_embeddings.projection", "norm": "layernorm", "crops": True,
    "any_size": lambda config: True, "mlp_width": _dinos_mlp, "problem": _dinos_problem,
}  # fmt: skip
# By model_type of a vision model's own configuration.
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
        # What pretraining does to positions, at random.
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
# Models of images and texts, of which the vision model is used.
PAIRS = {
    "clip": "clip_vision_model",
    "siglip": "siglip_vision_model",
    "siglip2": "siglip2_vision_model",
    "aimv2": "aimv2_vision_model",
}


def tower_family(config: PreTrainedConfig) -> TowerFamily:
    """The family of a tower's configuration."""
    return TOWERS[config.model_type]
