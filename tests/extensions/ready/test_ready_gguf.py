"""--format gguf of ready models: every tensor is transformers', and llama.cpp gets training's prompts."""

import json
import re
from pathlib import Path

import gguf
import jinja2
import numpy as np
import pytest
import ready_gguf
import ready_models
from extension_there import needs_extension
from launching import run_script
from transformers import AutoModelForImageTextToText, AutoTokenizer

from llava_ds.constants import ConfigError

pytestmark = needs_extension("gguf")
MARK = "<__media_7__>"
# Places of tensors, written out: llama.cpp's names and transformers'.
TEXT_LAYER = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    **{f"attn_{a}": f"self_attn.{b}_proj" for a, b in (("q", "q"), ("k", "k"), ("v", "v"), ("output", "o"))},
    **{f"ffn_{name}": f"mlp.{name}_proj" for name in ("gate", "up", "down")},
}  # fmt: skip
TEXT_ENDS = {"token_embd.weight": "embed_tokens.weight", "output_norm.weight": "norm.weight"}
SIGLIP_LAYER = {
    "ln1": "layer_norm1", "ln2": "layer_norm2", "ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2",
    "attn_out": "self_attn.out_proj", **{f"attn_{name}": f"self_attn.{name}_proj" for name in "qkv"},
}  # fmt: skip
SIGLIP_ENDS = {
    "v.patch_embd": "vision_model.embeddings.patch_embedding",
    "v.position_embd": "vision_model.embeddings.position_embedding",
    "v.post_ln": "vision_model.post_layernorm",
    "mm.model.fc": "connector.modality_projection.proj",
}
QWEN_LAYER = {
    "ln1": "norm1", "ln2": "norm2", "attn_out": "attn.proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}  # fmt: skip
QWEN_ENDS = {"v.post_ln": "visual.merger.ln_q", "mm.0": "visual.merger.mlp.0", "mm.2": "visual.merger.mlp.2"}


def place_of(name: str, family: str) -> tuple[str, object]:
    """transformers' name of a tensor, and its part there."""
    is_qwen, whole = family.startswith("qwen"), ...
    text = "model.language_model." if is_qwen else "model.text_model."
    if name == "output.weight":
        return "lm_head.weight", whole
    if name in TEXT_ENDS:
        return text + TEXT_ENDS[name], whole
    if found := re.fullmatch(r"blk\.(\d+)\.(\w+)\.(\w+)", name):
        return f"{text}layers.{found[1]}.{TEXT_LAYER[found[2]]}.{found[3]}", whole
    if is_qwen and name.startswith("v.patch_embd.weight"):
        return "model.visual.patch_embed.proj.weight", np.s_[:, :, int(name.endswith(".1"))]
    layer, ends = (QWEN_LAYER, QWEN_ENDS) if is_qwen else (SIGLIP_LAYER, SIGLIP_ENDS)
    if family == "qwen2_vl":
        layer = {**layer, "ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"}
    if found := re.fullmatch(r"v\.blk\.(\d+)\.(\w+)\.(\w+)", name):
        if is_qwen and found[2] in ("attn_q", "attn_k", "attn_v"):
            third = "qkv".index(found[2][-1])
            return f"model.visual.blocks.{found[1]}.attn.qkv.{found[3]}", np.s_[16 * third : 16 * (third + 1)]
        layers = "visual.blocks" if is_qwen else "vision_model.encoder.layers"
        return f"model.{layers}.{found[1]}.{layer[found[2]]}.{found[3]}", whole
    stem, _, end = name.rpartition(".")
    return f"model.{ends[stem]}.{end}", whole


def rotated_in_pairs(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of q or k as llama.cpp's Llama has them: it turns 2i with 2i + 1, transformers i with i + half."""
    half = len(weight) // num_heads // 2
    rows = [head * 2 * half + i + end for head in range(num_heads) for i in range(half) for end in (0, half)]
    return weight[rows]


def converted(source: Path, folder: Path, *flags: str) -> Path:
    run_script("export.py", source, "--format", "gguf", "--output_dir", folder, *flags)
    return folder


def fields_of(file: Path) -> dict[str, object]:
    return {name: field.contents() for name, field in gguf.GGUFReader(file).fields.items()}


@pytest.fixture(scope="module", params=ready_gguf.FAMILIES)
def family(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def source(family, tmp_path_factory) -> Path:
    return ready_gguf.write_ready(tmp_path_factory.mktemp(family) / "model", family)


@pytest.fixture(scope="module")
def exported(source) -> Path:
    return converted(source, source.with_name("gguf"))


def test_every_tensor_is_transformers(family, source, exported):
    expected = {name: t.numpy() for name, t in AutoModelForImageTextToText.from_pretrained(source).state_dict().items()}
    seen: dict[str, int] = {}
    for file in ("model", "mmproj"):
        for tensor in gguf.GGUFReader(exported / f"{file}.gguf").tensors:
            place, part = place_of(tensor.name, family)
            values = expected[place][part]
            heads = {"attn_q": 4, "attn_k": 2}.get(tensor.name.split(".")[-2]) if file == "model" else None
            if heads and not family.startswith("qwen"):
                values = rotated_in_pairs(values, heads)
            assert np.array_equal(tensor.data, values), tensor.name
            seen[place] = seen.get(place, 0) + tensor.data.size
    assert seen == {name: values.size for name, values in expected.items()}


def test_keys(family, exported):
    text, tower = fields_of(exported / "model.gguf"), fields_of(exported / "mmproj.gguf")
    expected = {"general.architecture": "clip", "general.type": "mmproj", "clip.vision.projection_dim": 32,
                "clip.vision.embedding_length": 16, "clip.vision.feed_forward_length": 32,
                "clip.vision.block_count": 2, "clip.vision.attention.head_count": 2}  # fmt: skip
    if family.startswith("qwen"):
        assert text["general.architecture"] == "qwen2vl" and text["qwen2vl.rope.dimension_sections"] == [4, 2, 2, 0]
        cells = {
            "patch_size": 28,
            "spatial_merge_size": 2,
            "image_min_pixels": 4 * 56**2,
            "image_max_pixels": 64 * 56**2,
        }
        expected |= {f"clip.vision.{name}": value for name, value in cells.items()}
        expected["clip.projector_type"] = {"qwen2_vl": "qwen2vl_merger", "qwen2_5_vl": "qwen2.5vl_merger"}[family]
        if family == "qwen2_5_vl":
            expected |= {"clip.use_silu": True, "clip.vision.n_wa_pattern": 2}
        eps = 1e-6
    else:
        assert text["general.architecture"] == "llama"
        tiles = {"patch_size": 8, "image_size": 32, "preproc_image_size": 96, "projector.scale_factor": 2}
        expected |= {f"clip.vision.{name}": value for name, value in tiles.items()}
        expected |= {"clip.projector_type": "idefics3", "clip.use_gelu": True}
        eps = ready_models.VISION.get("layer_norm_eps", 1e-6)
    assert {name: tower.get(name) for name in expected} == expected
    assert tower["clip.vision.attention.layer_norm_epsilon"] == pytest.approx(eps)
    assert not text["tokenizer.ggml.add_bos_token"] and text["tokenizer.ggml.eos_token_id"] == 2
    modelfile = (exported / "Modelfile").read_text()
    assert modelfile == "FROM ./model.gguf\nFROM ./mmproj.gguf\n"


IMAGE, QUESTION = {"type": "image"}, {"type": "text", "text": "What is it?"}
TALKS = [
    [("user", [IMAGE, QUESTION])],
    [("user", [QUESTION, IMAGE, QUESTION, IMAGE])],
    [("system", [{"type": "text", "text": "Be brief."}]), ("user", [IMAGE, QUESTION]), ("assistant", [QUESTION]),
     ("user", [QUESTION])],
]  # fmt: skip


@pytest.mark.parametrize("as_text", [True, False])
@pytest.mark.parametrize("talk", TALKS)
def test_prompts_are_trainings(talk, as_text, family, source, exported):
    written = "<|vision_start|><|image_pad|><|vision_end|>" if family.startswith("qwen") else "<image>"
    messages = [{"role": role, "content": content} for role, content in talk]
    tokenizer = AutoTokenizer.from_pretrained(source)
    expected = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    marked = [[{"type": "text", "text": part.get("text", MARK)} for part in content] for _, content in talk]
    contents = ["".join(part["text"] for part in content) for content in marked] if as_text else marked
    given = [{"role": role, "content": content} for (role, _), content in zip(talk, contents)]
    template = fields_of(exported / "model.gguf")["tokenizer.chat_template"]
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    found = environment.from_string(template).render(messages=given, add_generation_prompt=True)
    assert found == expected.replace(written, MARK)


def changed(source: Path, folder: Path, file: str, change) -> Path:
    """A copy of a model's folder with another JSON file."""
    folder.mkdir()
    for each in source.iterdir():
        (folder / each.name).write_bytes(each.read_bytes())
    content = json.loads((source / file).read_text())
    change(content)
    (folder / file).write_text(json.dumps(content))
    return folder


CONFIG, PROCESSOR = "config.json", "processor_config.json"


def half_tiles(processor: dict) -> None:
    processor["image_processor"]["max_image_size"]["longest_edge"] = 16
    processor["image_seq_len"] = 1


def tower_with(**settings: object):
    return lambda config: config["vision_config"].update(settings)


REFUSED = {
    "smolvlm": [
        (CONFIG, tower_with(hidden_act="gelu"), "has hidden_act gelu, expected gelu_pytorch_tanh"),
        (PROCESSOR, half_tiles, "tiles of 16 pixels are not the tower's 32"),
        (PROCESSOR, lambda c: c["image_processor"].update(do_image_splitting=False), "llama.cpp cuts every image"),
        (PROCESSOR, lambda c: c["image_processor"]["size"].update(longest_edge=32), "llama.cpp cuts every image"),
    ],
    "qwen2_5_vl": [
        (CONFIG, tower_with(window_size=224), "has window_size 224, expected 112"),
        (CONFIG, tower_with(fullatt_block_indexes=[0]), "expected every n-th"),
        (CONFIG, tower_with(hidden_act="gelu"), "has hidden_act gelu, expected silu"),
    ],
    "qwen2_vl": [(CONFIG, tower_with(hidden_act="silu"), "has hidden_act silu, expected quick_gelu")],
}


def test_models_that_llama_cpp_computes_differently_are_refused(family, source, tmp_path):
    for i, (file, change, message) in enumerate(REFUSED.get(family, ())):
        with pytest.raises(ConfigError, match=re.escape(message)):
            converted(changed(source, tmp_path / str(i), file, change), tmp_path / "no")
        assert not (tmp_path / "no").exists()


def test_other_families_and_tokenizers_are_refused(tmp_path):
    ready_models.write_ready(tmp_path / "gemma3", "gemma3")
    with pytest.raises(
        ConfigError,
        match="the ready models with this format are smolvlm, idefics3, qwen2_vl, qwen2_5_vl; give --format hf",
    ):
        converted(tmp_path / "gemma3", tmp_path / "no")
    ready_models.write_ready(tmp_path / "smolvlm", "smolvlm")
    with pytest.raises(ConfigError, match=re.escape(r"the tokenizer has no token '\n\n' for tiles")):
        converted(tmp_path / "smolvlm", tmp_path / "no")


def test_tied_outputs_and_digits(tmp_path):
    source = ready_gguf.write_ready(tmp_path / "model", "smolvlm", tie_word_embeddings=True)

    def divide_numbers(content: dict) -> None:
        steps = [{"type": "Digits", "individual_digits": True}, content["pre_tokenizer"]]
        content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": steps}

    folder = converted(changed(source, tmp_path / "digits", "tokenizer.json", divide_numbers), tmp_path / "gguf")
    assert fields_of(folder / "model.gguf")["tokenizer.ggml.pre"] == "smollm"
    assert "output.weight" not in {tensor.name for tensor in gguf.GGUFReader(folder / "model.gguf").tensors}
