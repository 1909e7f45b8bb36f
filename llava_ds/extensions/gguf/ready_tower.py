# C width of the tower, P side of a patch in pixels
"""Convert towers and chat templates of ready models (transformers' own vision-language models) for llama.cpp.

Names, keys and layouts follow llama.cpp's conversion/ and tools/mtmd/.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from llava_ds.export.export_plan import ExportPlan
from llava_ds.export.tensors import Entry

WARM_UP_SIDE = 560  # llama.cpp requires an image size, but only warms up with it, because images keep their own size
TILE_TOKENS = ("\n", "\n\n", "<fake_token_around_image>", "<global-img>")  # llama.cpp inserts them around tiles
QWEN2 = {"spatial_merge_size": 2, "temporal_patch_size": 2, "hidden_act": "quick_gelu"}  # fixed in llama.cpp's code
QWEN25 = {**QWEN2, "hidden_act": "silu", "window_size": 112}


@dataclass(frozen=True)
class ReadyForm:
    """A family of ready models in llama.cpp.

    projector: name of the projector in llama.cpp; tower, connector: prefixes of tensor names in gguf's TensorNameMap;
    mark: the text for an image in llama.cpp and the chat template; constants: required settings of the
    tower; lacks: returns why llama.cpp would compute other features, or None; add_keys: writes the family's own keys.
    """

    projector: str
    tower: str
    connector: str
    mark: str
    constants: dict[str, object]
    lacks: Callable[[ExportPlan], str | None]
    add_keys: Callable[[object, ExportPlan], None]


def ready_problem(export: ExportPlan) -> str | None:
    """Return why llama.cpp doesn't support a ready model or computes it differently; None if it computes the same."""
    form, tower = READY.get(export.model.architecture.config.model_type), export.model.tower.config
    if form is None:
        return f"the ready models with this format are {', '.join(READY)}"
    if export.model.has_value_head:
        return "a reward model's head has no place in it"
    if form.mark not in export.model.tokenizer.chat_template:
        return f"the chat template writes no {form.mark} for an image"
    for name, expected in form.constants.items():
        if getattr(tower, name) != expected:
            return f"the tower has {name} {getattr(tower, name)}, expected {expected}"
    return form.lacks(export)


def _other_tiles(export: ExportPlan) -> str | None:
    tower, tiling = export.model.tower.config, export.image_options.tiling
    if tiling.side != tower.image_size:
        return f"tiles of {tiling.side} pixels are not the tower's {tower.image_size}"
    if not tiling.splits or tiling.longest_edge <= tiling.side:
        return "an image is one tile, and llama.cpp cuts every image into tiles"
    tokenize = export.model.tokenizer.tokenize
    missing = [token for token in TILE_TOKENS if len(tokenize(token, add_special_tokens=False)) != 1]
    return f"the tokenizer has no token {missing[0]!r} for tiles" if missing else None


def _add_tile_keys(writer, export: ExportPlan) -> None:
    writer.add_vision_projector_scale_factor(export.model.architecture.config.scale_factor)
    writer.add_vision_preproc_image_size(export.image_options.tiling.longest_edge)
    writer.add_vision_use_gelu(True)


def _other_windows(export: ExportPlan) -> str | None:
    full = sorted(set(export.model.tower.config.fullatt_block_indexes))
    if not full or full != [*range(full[0], export.model.tower.config.depth, full[0] + 1)]:
        return f"the tower's layers without windows are {full}, expected every n-th"
    return None


def _add_cell_keys(writer, export: ExportPlan) -> None:
    tower, tiling = export.model.tower.config, export.image_options.tiling
    writer.add_vision_spatial_merge_size(tower.spatial_merge_size)
    writer.add_vision_min_pixels(tiling.least)
    writer.add_vision_max_pixels(tiling.most)
    if hasattr(tower, "fullatt_block_indexes"):
        writer.add_vision_use_silu(True)
        writer.add_vision_n_wa_pattern(min(tower.fullatt_block_indexes) + 1)


_TILES = ReadyForm(
    "idefics3", "model.vision_model.", "model.connector.", "<image>", {"hidden_act": "gelu_pytorch_tanh"}, _other_tiles,
    _add_tile_keys,
)  # fmt: skip
_QWEN = ("visual.", "visual.merger.", "<|vision_start|><|image_pad|><|vision_end|>")
READY = {  # by transformers' model_type
    "smolvlm": _TILES,
    "idefics3": _TILES,
    "qwen2_vl": ReadyForm("qwen2vl_merger", *_QWEN, QWEN2, lambda export: None, _add_cell_keys),
    "qwen2_5_vl": ReadyForm("qwen2.5vl_merger", *_QWEN, QWEN25, _other_windows, _add_cell_keys),
}


def ready_tower(form: ReadyForm, entries: list[Entry], num_layers: int) -> list[Entry]:
    """Return the tensors of tower and connector under their names in llama.cpp."""
    import gguf

    # The connector's matrices are numbered up to 2 in the same map, so it needs at least 3 layers.
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, max(num_layers, 3))
    found = []
    for entry in entries:
        place = entry.name.replace("vision_tower.tower.", form.tower).replace("projector.connector.", form.connector)
        for part in _divided(Entry(place, entry.shape, entry.read)):
            name = names.get_name(part.name, try_suffixes=(".weight", ".bias", ".weight.1"))
            assert name is not None, f"llama.cpp has no name for {entry.name}"
            found.append(Entry(name, part.shape, part.read))
    return found


def _divided(entry: Entry) -> list[Entry]:
    """Split a fused q, k, v matrix, or a kernel (C, 3, 2, P, P) of two frames, as llama.cpp stores the parts."""

    def part(name: str, shape: tuple[int, ...], take: Callable[[torch.Tensor], torch.Tensor]) -> Entry:
        return Entry(name, shape, lambda: take(entry.read()))

    if ".qkv." in entry.name:
        shape = (entry.shape[0] // 3, *entry.shape[1:])
        return [part(entry.name.replace("qkv", to), shape, lambda t, i=i: t.chunk(3)[i]) for i, to in enumerate("qkv")]
    if len(entry.shape) == 5:
        shape = entry.shape[:2] + entry.shape[3:]
        return [part(entry.name + end, shape, lambda t, i=i: t[:, :, i]) for i, end in enumerate(("", ".1"))]
    return [entry]


def ready_template(form: ReadyForm, template: str) -> str:
    """Wrap a processor's chat template for llama.cpp, because llama.cpp passes images as marks like <__media__>.

    The wrapper converts marks to parts of type "image", as in training, and the template's image text back to marks.
    """
    template = template.removesuffix("\n")  # Jinja also removes it at the end of a file
    return f"{_AS_PARTS}{template}{{% endset %}}{_MARKED.replace('MARK', form.mark)}"


_AS_PARTS = (
    "{% set talk = namespace(turns=[], mark='') %}{% for message in messages %}"
    "{% set found = namespace(text='', parts=[]) %}"
    "{% if message['content'] is string %}{% set found.text = message['content'] %}"
    "{% else %}{% for part in message['content'] or [] %}{% set found.text = found.text + part['text'] %}{% endfor %}"
    "{% endif %}{% for piece in found.text.split('<__media') %}{% set rest = namespace(text=piece) %}"
    "{% if not loop.first %}{% set cut = piece.split('__>') %}{% set talk.mark = '<__media' + cut[0] + '__>' %}"
    "{% set found.parts = found.parts + [{'type': 'image'}] %}{% set rest.text = cut[1:] | join('__>') %}{% endif %}"
    "{% if rest.text %}{% set found.parts = found.parts + [{'type': 'text', 'text': rest.text}] %}{% endif %}"
    "{% endfor %}{% set talk.turns = talk.turns + [dict(message, content=found.parts)] %}{% endfor %}"
    "{% set messages = talk.turns %}{% set written %}"
)
_MARKED = "{{ written | replace('MARK', talk.mark) if talk.mark else written }}"
