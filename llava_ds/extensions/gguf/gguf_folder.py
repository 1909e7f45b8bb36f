# D width of a matrix's input, H attention heads
"""Write a folder for llama.cpp and Ollama: one GGUF file of the language model, one of the tower and projector, and a
Modelfile. Names, keys and layouts follow llama.cpp's convert_hf_to_gguf.py and tools/mtmd/clip.cpp.
"""

import dataclasses
import importlib.util
import math
import re
from pathlib import Path

import numpy as np
import torch

from llava_ds.constants import ConfigError
from llava_ds.data.templates import resolve_template
from llava_ds.export.export_plan import ExportPlan, hf_container, own_vision
from llava_ds.export.tensors import Entry
from llava_ds.export.transformers_folder import hf_entries, tokenizer_and_rows
from llava_ds.extensions.active import text_part
from llava_ds.extensions.gguf.gguf_tokenizer import add_tokenizer, modelfile
from llava_ds.extensions.gguf.ready_tower import READY, WARM_UP_SIDE, ready_problem, ready_template, ready_tower

MODEL_FILE, TOWER_FILE, MODELFILE = "model.gguf", "mmproj.gguf", "Modelfile"
# llama.cpp's architecture by transformers' model_type
ARCHITECTURES = {
    "llama": "LLAMA", "mistral": "LLAMA", "qwen2": "QWEN2", "qwen2_vl_text": "QWEN2VL", "qwen2_5_vl_text": "QWEN2VL",
}  # fmt: skip
TYPES = {"float32": "F32", "float16": "F16", "q8_0": "Q8_0"}  # values of --dtype
MAX_FLOAT16 = torch.finfo(torch.float16).max
PROJECTOR = {"linear_1": "mm.0", "linear_2": "mm.2"}
_LANGUAGE_MODEL, _PROJECTOR = "language_model.", "multi_modal_projector."
_TOWER_LAYER = re.compile(r"vision_tower\.vision_model\.encoder\.layers\.(\d+)\.")


def with_gguf_type(export: ExportPlan, dtype: str) -> ExportPlan:
    """Return the plan with the data type of matrices and the chat template. dtype: --dtype's value.

    Raises ConfigError for an unknown type, for a model that llama.cpp doesn't support or computes differently, and if
    the package gguf is missing.
    """
    if dtype == "auto":
        dtype = "float32" if export.dtype == torch.float32 else "float16"
    if dtype not in TYPES:
        raise ConfigError(f"--format gguf has no {dtype}: give one of {', '.join(TYPES)}")
    if importlib.util.find_spec("gguf") is None:
        raise ConfigError("--format gguf needs the package gguf: pip install 'llava_ds[gguf]'")
    ready, template, text = export.model.architecture, export.template, export.model.text_config
    if ready is None:
        why = _other_model(export) or _other_language_model(text) or _other_tower(export)
    else:
        why = ready_problem(export) or _other_language_model(text)
    if why:
        raise ConfigError(f"--format gguf is not possible: {why}; give --format hf")
    if ready is not None:
        template = ready_template(READY[ready.config.model_type], export.model.tokenizer.chat_template)
    return dataclasses.replace(export, matrix_type=dtype, template=template)


def _other_model(export: ExportPlan) -> str | None:
    plan, images = export.model, export.image_options
    kind = hf_container(plan, images)
    if why := own_vision(plan, export.args, images):
        return why
    if kind != "llava" or images.is_anyres or images.has_newline:
        return f"images become tiles or get newlines (--image_aspect_ratio {images.aspect_ratio})"
    if plan.has_value_head:
        return "a reward model's head has no place in it"
    if export.template is None and resolve_template(export.args.version) == "plain":
        return "--version plain has no questions"
    return None


def _other_language_model(config) -> str | None:
    kind, rope = config.model_type, config.rope_parameters
    if kind not in ARCHITECTURES or "dense_mlps" in text_part(config).breaks(config):
        return f"the language model is a {kind}, expected one of {', '.join(ARCHITECTURES)}"
    if rope["rope_type"] not in ("default", "linear", "llama3"):
        return f"the language model's positions are {rope['rope_type']}, expected default, linear or llama3"
    if config.hidden_act != "silu":
        return f"the language model has {config.hidden_act}, expected silu"
    if getattr(config, "use_sliding_window", False):
        return "the language model has sliding windows in some layers"
    return None


def _other_tower(export: ExportPlan) -> str | None:
    tower, spec = export.model.tower, export.model.images
    if tower.config.model_type != "clip_vision_model":
        return f"the tower is a {tower.config.model_type}, expected CLIP"
    if tower.images.class_token:
        return "--mm_vision_select_feature cls_patch keeps the class token"
    if tower.config.hidden_act not in ("quick_gelu", "gelu"):
        return f"the tower has {tower.config.hidden_act}, expected quick_gelu or gelu"
    if spec.size != tower.config.image_size:
        return f"images of {spec.size} pixels are not the tower's {tower.config.image_size}"
    return None


def write_gguf(export: ExportPlan, entries: list[Entry], output_dir: Path) -> None:
    """Write model.gguf, mmproj.gguf and Modelfile, with one tensor in memory at a time.

    export: from with_gguf_type; entries: the model's tensors, under their names in this project. Raises ConfigError for
    a tokenizer that llama.cpp would interpret differently, and for weights too large for float16.
    """
    if export.model.architecture is None:
        entries = hf_entries(export, entries)
    _write_language_model(export, [e for e in entries if e.name.startswith(_LANGUAGE_MODEL)], output_dir / MODEL_FILE)
    rest = [e for e in entries if not e.name.startswith(_LANGUAGE_MODEL)]
    write_tower = _write_tower if export.model.architecture is None else _write_ready_tower
    write_tower(export, rest, output_dir / TOWER_FILE)
    text = modelfile(export, (MODEL_FILE, TOWER_FILE))
    (output_dir / MODELFILE).write_text(text, encoding="utf-8")


def _write_language_model(export: ExportPlan, entries: list[Entry], path: Path) -> None:
    import gguf

    config = export.model.text_config
    arch = gguf.MODEL_ARCH[ARCHITECTURES[config.model_type]]
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    num_heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    tensors = []
    for entry in entries:
        name = names.get_name(entry.name.removeprefix(_LANGUAGE_MODEL), try_suffixes=(".weight", ".bias"))
        assert name is not None, f"llama.cpp has no name for {entry.name}"
        if name == "output.weight" and export.names.tied_in_hf:
            continue  # without this tensor, llama.cpp uses the embeddings
        heads = num_heads.get(entry.name.split(".")[-2]) if arch == gguf.MODEL_ARCH.LLAMA else None
        read = entry.read if heads is None else lambda read=entry.read, heads=heads: interleaved(read(), heads)
        tensors.append(dataclasses.replace(entry, name=name, read=read))
    if (factors := _rope_factors(config)) is not None:
        tensors.append(Entry("rope_freqs.weight", tuple(factors.shape), lambda: factors))
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch])
    tokenizer, rows = export.model.tokenizer, export.vocab_size
    if export.model.architecture is None:
        tokenizer, rows = tokenizer_and_rows(export)
    _add_language_model(writer, config, rows)
    add_tokenizer(writer, export, tokenizer, rows)
    _write(writer, tensors, export)


def interleaved(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Reorder the rows of q or k for llama.cpp's Llama, where a pair that is rotated together is adjacent.

    In transformers, each half of a head has one element of every pair. weight (H * head width, D), or a bias. Source:
    LlamaModel.permute in llama.cpp's conversion.
    """
    halves = weight.reshape(num_heads, 2, -1, *weight.shape[1:])
    return halves.transpose(1, 2).reshape(weight.shape)


def _add_language_model(writer, config, rows: int) -> None:
    """Add the keys for a language model's dimensions and positions. rows: number of embedding rows."""
    import gguf

    length, rope = config.max_position_embeddings, config.rope_parameters
    head_width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    # In contexts up to the window's length, attention with a window equals full attention.
    window = config.sliding_window if config.model_type == "mistral" else None
    writer.add_vocab_size(rows)
    writer.add_context_length(length if window is None else min(length, window))
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_width)
    writer.add_value_length(head_width)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(head_width)
    writer.add_rope_freq_base(rope["rope_theta"])
    if "mrope_section" in rope:
        writer.add_rope_dimension_sections([*rope["mrope_section"], 0])
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])


def _rope_factors(config) -> torch.Tensor | None:
    """Return the factors by which llama.cpp divides the rotary frequencies, (head width / 2,).

    Returns None if the rope type isn't llama3. transformers computes scaled frequencies instead of such factors.
    """
    if config.rope_parameters["rope_type"] != "llama3":
        return None
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    width = 2 * len(scaled)
    plain = config.rope_parameters["rope_theta"] ** (-torch.arange(0, width, 2, dtype=torch.float32) / width)
    return plain / scaled


def _write_tower(export: ExportPlan, entries: list[Entry], path: Path) -> None:
    """Write the tower up to the layer that the projector reads, and the projector."""
    import gguf

    config, spec = export.model.tower.config, export.model.images
    layer = export.args.mm_vision_select_layer
    num_layers = layer if layer >= 0 else config.num_hidden_layers + 1 + layer
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, config.num_hidden_layers)
    tensors = []
    for entry in entries:
        found = _TOWER_LAYER.match(entry.name)
        if (found and int(found[1]) >= num_layers) or ".post_layernorm." in entry.name:
            continue
        if entry.name.startswith(_PROJECTOR):
            module, kind = entry.name.removeprefix(_PROJECTOR).split(".")
            name = f"{PROJECTOR[module]}.{kind}"
        else:
            name = names.get_name(entry.name, try_suffixes=(".weight", ".bias"))
        assert name is not None, f"llama.cpp has no name for {entry.name}"
        tensors.append(dataclasses.replace(entry, name=name))
    writer = _tower_writer(export, path, "mlp", spec.size, num_layers)
    writer.add_array("clip.vision.feature_layer", [num_layers])
    if config.hidden_act == "gelu":
        writer.add_vision_use_gelu(True)
    _write(writer, tensors, export)


def _write_ready_tower(export: ExportPlan, entries: list[Entry], path: Path) -> None:
    """Write a ready model's tower and connector."""
    config, tiling = export.model.tower.config, export.image_options.tiling
    form = READY[export.model.architecture.config.model_type]
    num_layers = getattr(config, "depth", None) or config.num_hidden_layers
    size = WARM_UP_SIDE if tiling.takes_whole_images else tiling.side
    writer = _tower_writer(export, path, form.projector, size, num_layers)
    form.add_keys(writer, export)
    _write(writer, ready_tower(form, entries, num_layers), export)


def _tower_writer(export: ExportPlan, path: Path, projector: str, size: int, num_layers: int):
    """Return a GGUFWriter with the keys that all towers need. projector: its name in llama.cpp; size: image side."""
    import gguf

    tower, spec = export.model.tower, export.model.images
    config = tower.config
    writer = gguf.GGUFWriter(path, "clip")
    writer.add_type("mmproj")
    writer.add_clip_has_vision_encoder(True)
    writer.add_clip_projector_type(projector)
    writer.add_vision_image_size(size)
    writer.add_vision_patch_size(config.patch_size)
    writer.add_vision_image_mean(list(spec.mean))
    writer.add_vision_image_std(list(spec.std))
    writer.add_vision_embedding_length(tower.layer_width)
    writer.add_vision_feed_forward_length(tower.mlp_width)
    writer.add_vision_block_count(num_layers)
    writer.add_vision_head_count(getattr(config, "num_heads", None) or config.num_attention_heads)
    # Qwen-VL's configuration has no such field, because transformers' code contains the value.
    writer.add_vision_attention_layernorm_eps(getattr(config, "layer_norm_eps", 1e-6))
    writer.add_vision_projection_dim(export.model.text_config.hidden_size)
    return writer


def type_of(name: str, shape: tuple[int, ...], wanted: str):
    """Return the gguf.GGMLQuantizationType of a tensor. wanted: the type for matrices, one of TYPES' values.

    Vectors and position embeddings stay fp32. Matrices whose width isn't a multiple of q8_0's 32 become float16.
    """
    from gguf import GGMLQuantizationType as Type

    if len(shape) < 2 or name == "v.position_embd.weight":
        return Type.F32
    if wanted == "Q8_0" and (len(shape) != 2 or shape[-1] % 32):
        return Type.F16
    return Type[wanted]


def _write(writer, entries: list[Entry], export: ExportPlan) -> None:
    """Write the file: first the metadata of all tensors, then the tensors, one at a time."""
    import gguf

    wanted = TYPES[export.matrix_type]
    file_type = {"F32": "ALL_F32", "F16": "MOSTLY_F16", "Q8_0": "MOSTLY_Q8_0"}[wanted]
    writer.add_file_type(gguf.LlamaFileType[file_type])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    types = [type_of(entry.name, entry.shape, wanted) for entry in entries]
    for entry, kind in zip(entries, types):
        block, num_bytes = gguf.GGML_QUANT_SIZES[kind]
        size = math.prod(entry.shape) // block * num_bytes
        writer.add_tensor_info(entry.name, entry.shape, np.dtype(np.float32), size, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for entry, kind in zip(entries, types):
        tensor = entry.read().detach().float().contiguous()
        if kind == gguf.GGMLQuantizationType.F16 and (largest := tensor.abs().max().item()) > MAX_FLOAT16:
            raise ConfigError(f"{entry.name} has a weight of {largest:g}, beyond float16's range: give --dtype float32")
        writer.write_tensor_data(gguf.quantize(tensor.numpy(), kind))
    writer.close()
