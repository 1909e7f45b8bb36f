"""The families of ready vision-language models that can be trained, and how to find a folder's family.

To add a family: write its file in families/, with a FAMILY as described in family.py, and add it to READY. Its tiles
are in ready_tilings.py, its videos are a VideoRule (ready_videos.py). Then add its small model to
tests/helpers/ready_models.py and a row to docs/ready.md.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from transformers import AutoModelForCausalLM

if TYPE_CHECKING:
    from llava_ds.extensions.ready.family import ReadyFamily

READY = {  # model_type in config.json: the file in families/, and the family's name in it
    "idefics3": ("idefics3", "FAMILY"),
    "smolvlm": ("idefics3", "FAMILY"),
    "internvl": ("internvl", "FAMILY"),
    "gemma3": ("gemma3", "FAMILY"),
    "gemma4": ("gemma4", "FAMILY"),
    "qwen2_vl": ("qwen2_vl", "FAMILY"),
    "qwen2_5_vl": ("qwen2_5_vl", "FAMILY"),
    "qwen3_vl": ("qwen3_vl", "FAMILY"),
    "qwen3_vl_moe": ("qwen3_vl", "MIXTURE"),
    "qwen3_5": ("qwen3_5", "FAMILY"),
    "qwen3_5_moe": ("qwen3_5", "MIXTURE"),
}

# Extensions that ready models need for their language models.
NEEDED = dict.fromkeys(("qwen3_vl_moe", "qwen3_5_moe"), "mixtures")

# Other vision-language models in transformers that people fine-tune, and why this project can't.
NOT_YET = {
    **dict.fromkeys(("glm4v", "glm46v"), "its tower's positions are of an unknown kind"),
    "gemma3n": "its layers have several streams of hidden states",
    "gemma4_unified": "its images go into the language model without a tower",
    "paligemma": "its prompt tokens all attend to each other",
    "mllama": "its images are not part of the sequence",
}


def family_of(model_type: str) -> "ReadyFamily | None":
    """Import and return the family of a ready model; None for another kind of model."""
    if model_type not in READY:
        return None
    file, name = READY[model_type]
    return getattr(import_module(f"{__package__}.families.{file}"), name)


def register_text_models(family: "ReadyFamily") -> None:
    """Register a family's language model classes that transformers lacks, or that would mix packed samples there."""
    for model in family.text_models:
        AutoModelForCausalLM.register(model.config_class, model, exist_ok=True)
