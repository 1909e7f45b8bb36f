"""The families of ready vision-language models that can be trained, and the way to one in a folder.

To add a family: write its file beside this one, whose FAMILY says what ready_family.py lists, and put it into FAMILIES.
Its tiles are in llava_ds/tilings.py. Then add its small model to tests/helpers/ready_models.py and a row to
docs/ready_models.md.
"""

from llava_ds.model.families import idefics3, internvl
from llava_ds.model.families.ready_family import ReadyFamily

FAMILIES = (idefics3.FAMILY, internvl.FAMILY)
READY: dict[str, ReadyFamily] = {kind: family for family in FAMILIES for kind in family.model_types}

# Ready models of transformers' that people fine-tune, and the reason why not with this program.
_POSITIONS = "its positions have three axes and its images no fixed size"
NOT_YET = {
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "glm4v", "glm46v"), _POSITIONS),
    **dict.fromkeys(("gemma3", "gemma4", "paligemma"), "tokens of one of its images see each other"),
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe"), "its language model has a state across tokens"),
    "mllama": "its images are not in the sequence",
}
