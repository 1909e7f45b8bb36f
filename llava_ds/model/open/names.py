"""Map tensor names between this package, LLaVA's files and llava-hf folders. No other file maps them.

Here:      vision_tower.tower.*   projector.layers.{0,2}.*   language_model.*
LLaVA:     model.vision_tower.vision_tower.vision_model.*   model.mm_projector.{0,2}.*, or model.mm_projector.* for a
           linear projector   the language model's own names
llava-hf:  vision_tower.vision_model.*   multi_modal_projector.linear_{1,2}.*   language_model.*
transformers 5 instead: model.vision_tower.*   model.multi_modal_projector.linear_{1,2}.*   model.language_model.* and
           lm_head.*, the language model's own names without its model in between

The learned newline is newline.embedding here, model.image_newline in LLaVA's files and image_newline in llava-hf's.
"""

import re
from pathlib import Path

from llava_ds.files.model_files import is_there

PROJECTOR = "projector.layers."
LLAVA_PROJECTOR = "model.mm_projector."
NEWLINE = "newline.embedding"
TOWER = "vision_tower.tower."
SECOND_TOWER = "tower.second."  # prefix of the second tower's names in the tower
LLAVA_TOWER = "model.vision_tower.vision_tower.vision_model."
LANGUAGE_MODEL = "language_model."
VALUE_HEAD = "value_head."  # its own file omits this prefix
VALUE_HEAD_FILE = "value_head.safetensors"  # in the model's folder; its one tensor is the head's weight
LLAVA_NEWLINE = "model.image_newline"
PROJECTOR_FILES = ("mm_projector.bin", "mm_projector.safetensors", "config.json")  # stage 1's folder
PARTS = ("vision_tower", "projector", "newline", "language_model", "value_head")
OWN = "own_"  # before an extension's name: its module, and the module's file in the model's folder


def own_file(folder: str | Path, part: str) -> Path | None:
    """Return the file of an extension's module in a folder, or None."""
    file = Path(folder) / f"{part}.safetensors"
    return file if is_there(file) else None


def value_head_file(folder: str | Path) -> Path | None:
    """Return the value head's file in a model folder, or None."""
    file = Path(folder) / VALUE_HEAD_FILE
    return file if is_there(file) else None


def is_of_child(name: str) -> bool:
    """True for a parameter of a child model: it trains with the main model, but is in no model file."""
    return name.partition(".")[0] not in PARTS and not name.startswith(OWN)


def projector_to_llava(name: str, kind: str) -> str:
    """Map "projector.layers.0.weight" or the newline to its name in LLaVA's mm_projector.bin. kind: projector kind."""
    if name == NEWLINE:
        return LLAVA_NEWLINE
    if name.startswith(LANGUAGE_MODEL):  # embeddings that trained with the projector
        return name.removeprefix(LANGUAGE_MODEL)
    rest = name.removeprefix(PROJECTOR)
    return LLAVA_PROJECTOR + (rest.removeprefix("0.") if kind == "linear" else rest)


def projector_from_llava(name: str) -> str | None:
    """Map a name in a projector file to one in the projector module ("layers.0.weight"); None for other tensors.

    Like LLaVA, it accepts any prefix before "mm_projector.", because runs with adapters and whole checkpoints have one.
    """
    if own := re.search(r"(?:^|\.)mm_projector\.(own\..+)$", name):  # an extension's
        return f"layers.{own[1]}"
    found = re.search(r"(?:^|\.)mm_projector\.((?:(?:\d+|pre_norm|proj|conv_pool)\.)*)(weight|bias)$", name)
    return None if found is None else f"layers.{found[1] or '0.'}{found[2]}"


def newline_from_llava(name: str) -> str | None:
    """Map a name in a projector file to the one in the newline module ("embedding"); None for other tensors."""
    return "embedding" if re.search(r"(?:^|\.)image_newline$", name) else None


def plain_name(name: str) -> str:
    """Map a name in adapter files of LLaVA or peft to the name in the model without adapters."""
    if name.startswith(("base_model.model.", "model.model.")):
        name = name.removeprefix("base_model.").removeprefix("model.")
    return name.replace(".modules_to_save.", ".").replace(".base_layer.", ".")


def language_model_from_disk(name: str, trunk: str = "model") -> str | None:
    """Map a name in a causal language model's folder to one in the model; None for computed tables in old files.

    trunk: attribute name of the model without its output layer. OPT's and GPT-2's published files omit this prefix.
    """
    if name.endswith("rotary_emb.inv_freq") or re.search(r"(?:^|\.)h\.\d+\.attn\.(?:masked_)?bias$", name):
        return None
    return name if name.startswith((f"{trunk}.", "lm_head.")) else f"{trunk}.{name}"


def language_model_from_llava(name: str, trunk: str = "model") -> str | None:
    """Map a name in LLaVA's format to one in the language model; None for names of other parts."""
    beside = name.startswith(("model.mm_", "model.vision_", "model.image_"))
    return None if beside else language_model_from_disk(name, trunk)


def tower_from_llava(name: str) -> str | None:
    """Map a name in LLaVA's format to one in the tower ("tower.*"); None for other tensors."""
    prefix = "model.vision_tower.vision_tower."
    return tower_from_disk(name.removeprefix(prefix)) if name.startswith(prefix) else None


def language_model_from_hf(name: str, inner: str) -> str | None:
    """Map a name in a folder of transformers' Llava, old or new, to one in the language model; None for other tensors.

    inner: attribute name of the trunk in the causal language model.
    """
    for trunk in ("model.language_model.", "language_model.model."):
        if name.startswith(trunk):
            return language_model_from_disk(f"{inner}.{name.removeprefix(trunk)}", inner)
    if name.startswith("language_model."):
        name = name.removeprefix("language_model.")
    elif name.startswith(("model.", "vision_tower.", "multi_modal_projector.", "image_newline")):
        return None
    return language_model_from_disk(name, inner)


def tower_from_hf(name: str) -> str | None:
    """Map a name in a folder of transformers' Llava to one in the tower ("tower.*"); None for other tensors."""
    name = name.removeprefix("model.")
    return tower_from_disk(name.removeprefix("vision_tower.")) if name.startswith("vision_tower.") else None


def projector_from_hf(name: str) -> str | None:
    """Map a name in a folder of transformers' Llava to one in the projector ("layers.0.weight"); None for others."""
    found = re.fullmatch(r"(?:model\.)?multi_modal_projector\.linear_([12])\.(weight|bias)", name)
    return None if found is None else f"layers.{ {'1': '0', '2': '2'}[found[1]] }.{found[2]}"


def tower_from_disk(name: str) -> str | None:
    """Map a name in a tower's folder (a vision model, perhaps with its text model) to one in the tower ("tower.*").

    None for the text model, projections and position buffers.
    """
    if name.startswith(("text_model.", "visual_projection.", "text_projection.", "logit_scale", "logit_bias")):
        return None
    name = name.removeprefix("vision_model.")
    return None if name == "embeddings.position_ids" else f"tower.{_tower_in_memory(name)}"


def second_tower_from_disk(name: str) -> str | None:
    """Map a name in the second tower's folder to "tower.second.tower.*"; None for other tensors."""
    found = tower_from_disk(name)
    return None if found is None else f"{SECOND_TOWER}{found}"


def _tower_in_memory(name: str) -> str:
    for on_disk, in_memory in _RENAMED_IN_TOWERS:
        name = on_disk.sub(in_memory, name)
    return name


# Names of DINOv2's and DINOv3's tensors that transformers changes on loading. Source: its conversion_mapping.py.
_RENAMED_IN_TOWERS = (
    (re.compile(r"\.attention\.attention\.(?:(q)uery|(k)ey|(v)alue)\."), r".attention.\1\2\3_proj."),
    (re.compile(r"\.attention\.output\.dense\."), ".attention.o_proj."),
    (re.compile(r"^layer\."), "model.layer."),
)


def tower_to_disk(name: str, kind: str) -> str:
    """Map a tensor's name in a tower to its name on disk. kind: the tower's model_type."""
    if kind.startswith("dinov2"):
        words = {"q_proj": "attention.query", "k_proj": "attention.key", "v_proj": "attention.value",
                 "o_proj": "output.dense"}  # fmt: skip
        return re.sub(r"(?<=\.attention\.)[qkvo]_proj(?=\.)", lambda found: words[found[0]], name)
    return name.replace("tower.model.layer.", "tower.layer.") if kind == "dinov3_vit" else name


def runs_in_tower(name: str, num_layers: int) -> bool:
    """True for parameters that are used if a tower runs num_layers layers. Later layers, the final norm, the pooling
    head and the mask token are not."""
    layer = re.match(r"tower\.(?:encoder\.layers?|model\.layer)\.(\d+)\.", name)
    never = ("tower.post_layernorm.", "tower.layernorm.", "tower.norm.", "tower.rms_norm.", "tower.head.")
    is_used = not name.startswith(never) and name != "tower.embeddings.mask_token"
    return is_used and not (layer and int(layer[1]) >= num_layers)


def unused_group(name: str) -> str:
    """Return the name of the group in which an unused tensor is reported."""
    if name.endswith("rotary_emb.inv_freq") or name.endswith("embeddings.position_ids"):
        return "computed tables"
    if name.startswith(("text_model.", "visual_projection.", "text_projection.", "logit_scale", "logit_bias")):
        return "the text model that the tower was trained with"
    return re.sub(r"\.\d+(?=\.|$)", ".*", name.rpartition(".")[0] or name)


def to_own_parts(name: str) -> str:
    """Map a parameter's name here to its name in transformers' Llava with this package's tower and projector inside."""
    return "multi_modal_projector." + name.removeprefix("projector.") if name.startswith(PROJECTOR) else name


def to_hf(name: str, tower: str = "clip_vision_model", in_hf: str = "vision_model.") -> str:
    """Map a parameter's name here to its name in a llava-hf folder, in the spelling that every version reads.

    tower: the tower's model_type; in_hf: TowerFamily.in_hf of its family.
    """
    if name.startswith(TOWER):
        return f"vision_tower.{in_hf}" + tower_to_disk(name, tower).removeprefix(TOWER)
    if name.startswith(PROJECTOR):
        layer, _, rest = name.removeprefix(PROJECTOR).partition(".")
        return f"multi_modal_projector.linear_{ {'0': 1, '2': 2}[layer] }.{rest}"
    if name == NEWLINE:
        return "image_newline"
    return name


def to_transformers(name: str) -> str:
    """Map a name in a folder of transformers' Llava, old or new, to the name in transformers' class.

    Keeps "vision_model" in a tower's names, although some classes have no such module.
    Source: transformers' conversion_mapping.py, "llava".
    """
    if name.startswith("language_model.lm_head."):
        return name.removeprefix("language_model.")
    if name.startswith("language_model.model."):
        return "model.language_model." + name.removeprefix("language_model.model.")
    name = name if name.startswith(("model.", "lm_head.")) else f"model.{name}"
    part, prefix, rest = name.partition("model.vision_tower.")
    return f"{prefix}{_tower_in_memory(rest)}" if prefix and not part else name


def to_llava(name: str, kind: str) -> str:
    """Map a parameter's name here to its name in a whole model's folder in LLaVA's format. kind: projector kind."""
    if name.startswith("vision_tower.tower."):
        return "model.vision_tower.vision_tower.vision_model." + name.removeprefix("vision_tower.tower.")
    if name.startswith(PROJECTOR) or name == NEWLINE:
        return projector_to_llava(name, kind)
    return name.removeprefix("language_model.")
