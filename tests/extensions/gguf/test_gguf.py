"""--format gguf: gguf's own reader finds the folder's tensors, and llama.cpp's rules give training's tokens."""

import dataclasses
import importlib.util
import json
import re
import shutil
from itertools import pairwise
from pathlib import Path

import gguf
import jinja2
import numpy as np
import pytest
import torch
import toys
from exporting import RANKS, export, export_plan, export_toy
from gguf import GGMLQuantizationType as Type
from launching import run_script
from safetensors.torch import load_file, save_file
from transformers import AutoConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from llava_ds.config.arguments import ModelArguments
from llava_ds.constants import IMAGE_TOKEN, IMAGE_TOKEN_INDEX, ConfigError
from llava_ds.data.chat_template import ROLES
from llava_ds.data.encode import Encoder, EncodingOptions
from llava_ds.data.jinja_templates import llama_cpp_template
from llava_ds.data.sample import Message
from llava_ds.data.templates import TEMPLATES, render, render_prompt
from llava_ds.engine.construct import build_model
from llava_ds.export.output_folder import write_folder
from llava_ds.export.tensors import Entry
from llava_ds.export.tokenizer_files import hf_tokenizer
from llava_ds.extensions.gguf.gguf_tokenizer import add_tokenizer, modelfile
from llava_ds.model.open.model_plan import plan_model
from llava_ds.tokenizer import open_tokenizer

GOLDENS = Path(__file__).parents[2] / "data" / "goldens" / "tokenizers"
MARK = "<__media_7__>"
# Places of the toy's tensors, written out: llama.cpp's names and the folder's.
LAYER = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    **{f"attn_{a}": f"self_attn.{b}_proj" for a, b in (("q", "q"), ("k", "k"), ("v", "v"), ("output", "o"))},
    **{f"ffn_{name}": f"mlp.{name}_proj" for name in ("gate", "up", "down")},
}  # fmt: skip
TOWER_LAYER = {
    "ln1": "layer_norm1", "ln2": "layer_norm2", "ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2",
    "attn_out": "self_attn.out_proj",
    **{f"attn_{name}": f"self_attn.{name}_proj" for name in "qkv"},
}  # fmt: skip
ENDS = {
    "token_embd.weight": "language_model.model.embed_tokens.weight",
    "output.weight": "language_model.lm_head.weight",
    "output_norm.weight": "language_model.model.norm.weight",
    "v.class_embd": "vision_tower.vision_model.embeddings.class_embedding",
    "v.patch_embd.weight": "vision_tower.vision_model.embeddings.patch_embedding.weight",
    "v.position_embd.weight": "vision_tower.vision_model.embeddings.position_embedding.weight",
    **{f"v.pre_ln.{end}": f"vision_tower.vision_model.pre_layrnorm.{end}" for end in ("weight", "bias")},
    **{
        f"mm.{place}.{end}": f"multi_modal_projector.linear_{i}.{end}"
        for place, i in ((0, 1), (2, 2))
        for end in ("weight", "bias")
    },
}


def name_in_folder(name: str) -> str:
    if found := re.fullmatch(r"blk\.(\d+)\.(\w+)\.(\w+)", name):
        return f"language_model.model.layers.{found[1]}.{LAYER[found[2]]}.{found[3]}"
    if found := re.fullmatch(r"v\.blk\.(\d+)\.(\w+)\.(\w+)", name):
        return f"vision_tower.vision_model.encoder.layers.{found[1]}.{TOWER_LAYER[found[2]]}.{found[3]}"
    return ENDS[name]


def as_llama_cpp_turns(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of q or k: llama.cpp turns 2i with 2i + 1, transformers i with i + half."""
    width = len(weight) // num_heads
    order = [
        head * width + i + half for head in range(num_heads) for i in range(width // 2) for half in (0, width // 2)
    ]
    return weight[order]


def tensors_of(folder: Path) -> dict[str, gguf.ReaderTensor]:
    return {t.name: t for file in ("model", "mmproj") for t in gguf.GGUFReader(folder / f"{file}.gguf").tensors}


def fields_of(folder: Path, file: str = "model") -> dict[str, object]:
    return {name: field.contents() for name, field in gguf.GGUFReader(folder / f"{file}.gguf").fields.items()}


def converted(source: Path, folder: Path, *flags: str) -> Path:
    run_script("export.py", source, "--format", "gguf", "--output_dir", folder, *flags)
    return folder


@pytest.fixture(scope="module")
def toy(tmp_path_factory) -> Path:
    return export_toy(tmp_path_factory.mktemp("toy"))


@pytest.fixture(scope="module")
def qwen(tmp_path_factory) -> Path:
    """Tied ends, biases of q, k and v, and a byte-level tokenizer."""
    folder = tmp_path_factory.mktemp("qwen")
    args = ModelArguments(**toys.write_qwen_base(folder / "base"), version="chatml")
    plan = plan_model(args, 512)
    model = build_model(plan, args, {"zero_optimization": {"stage": 0}}, torch.float32, 0, RANKS)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_()
    export(model, plan, args, toys.image_options(aspect_ratio="pad"), folder / "out")
    return folder / "out"


@pytest.mark.parametrize("dtype", ["float32", "float16", "q8_0"])
@pytest.mark.parametrize("source", ["toy", "qwen"])
def test_every_tensor_is_the_folders(source, dtype, request, tmp_path):
    source = request.getfixturevalue(source)
    folder = converted(source, tmp_path / "gguf", "--dtype", dtype)
    expected, config = load_file(source / "model.safetensors"), json.loads((source / "config.json").read_text())
    heads = {"attn_q": 4, "attn_k": 2} if config["text_config"]["model_type"] == "llama" else {}
    found, seen, types = tensors_of(folder), set(), set()
    for name, tensor in found.items():
        place = name_in_folder(name)
        seen.add(place)
        values = expected[place].numpy()
        if (of := name.split(".")[-2]) in heads and name.startswith("blk."):
            values = as_llama_cpp_turns(values, heads[of])
        read = gguf.dequantize(tensor.data, tensor.tensor_type).reshape(values.shape)
        types.add(tensor.tensor_type)
        if tensor.tensor_type == Type.F32:
            assert np.array_equal(read, values), name
        elif tensor.tensor_type == Type.F16:
            assert np.array_equal(read, values.astype(np.float16).astype(np.float32)), name
        else:  # the largest of a block of 32 becomes 127 steps, whose size is a float16
            blocks = values.reshape(-1, 32)
            step = np.abs(blocks).max(1, keepdims=True) / 127
            assert (np.abs(read.reshape(-1, 32) - blocks) <= step * 0.57 + 1e-8).all(), name
    assert (
        types
        == {"float32": {Type.F32}, "float16": {Type.F32, Type.F16}, "q8_0": {Type.F32, Type.F16, Type.Q8_0}}[dtype]
    )
    # The projector reads the last layer but one; the output of a tied model is its embeddings.
    unused = {name for name in expected if ".encoder.layers.2." in name or "post_layernorm" in name}
    tied = {"language_model.lm_head.weight"} if config["text_config"]["tie_word_embeddings"] else set()
    assert seen == expected.keys() - unused - tied and unused


def test_keys_of_both_files(toy, tmp_path):
    folder = converted(toy, tmp_path / "gguf")
    fields, tower = fields_of(folder), fields_of(folder, "mmproj")
    config = json.loads((toy / "config.json").read_text())
    text, images = config["text_config"], json.loads((toy / "preprocessor_config.json").read_text())
    for key, value in {
        "general.architecture": "llama", "llama.vocab_size": text["vocab_size"], "llama.context_length": 512,
        "llama.embedding_length": 32, "llama.block_count": 2, "llama.feed_forward_length": 48,
        "llama.attention.head_count": 4, "llama.attention.head_count_kv": 2, "llama.rope.dimension_count": 8,
        "llama.attention.key_length": 8, "llama.rope.freq_base": 10000.0, "general.file_type": 0,
        "tokenizer.ggml.model": "llama", "tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_space_prefix": True,
        "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.chat_template": llama_cpp_template("v1"),
    }.items():  # fmt: skip
        assert fields[key] == value, key
    assert fields["llama.attention.layer_norm_rms_epsilon"] == pytest.approx(text["rms_norm_eps"])
    tokens, types = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    assert len(tokens) == len(types) == text["vocab_size"] and tokens[config["image_token_index"]] == IMAGE_TOKEN
    assert (types[0], types[1], types[3], types[config["image_token_index"]]) == (2, 3, 6, 3)
    for key, value in {
        "general.architecture": "clip", "general.type": "mmproj", "clip.has_vision_encoder": True,
        "clip.projector_type": "mlp", "clip.vision.image_size": 24, "clip.vision.patch_size": 8,
        "clip.vision.embedding_length": 16, "clip.vision.feed_forward_length": 32, "clip.vision.block_count": 2,
        "clip.vision.attention.head_count": 2, "clip.vision.projection_dim": 32, "clip.vision.feature_layer": [2],
    }.items():  # fmt: skip
        assert tower[key] == value, key
    assert tower["clip.vision.image_mean"] == pytest.approx(images["image_mean"])
    assert tower["clip.vision.image_std"] == pytest.approx(images["image_std"])
    assert "clip.use_gelu" not in tower  # the tower has quick_gelu
    assert (
        "library_name: gguf" in (folder / "README.md").read_text()
        or "llama-server" in (folder / "README.md").read_text()
    )


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "factor": 2.0},
        {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ],
)  # fmt: skip
def test_scaled_positions(toy, rope, tmp_path):
    source = tmp_path / "toy"
    changed(toy, source, lambda config: config["text_config"].update(rope_parameters={"rope_theta": 5e5, **rope}))
    folder = converted(source, tmp_path / "gguf")
    fields, tensors = fields_of(folder), tensors_of(folder)
    config = AutoConfig.from_pretrained(source).text_config
    angles = fields["llama.rope.freq_base"] ** (-np.arange(0, 8, 2) / 8)
    if rope["rope_type"] == "linear":
        angles = angles / fields["llama.rope.scaling.factor"]
        assert fields["llama.rope.scaling.type"] == "linear"
    else:
        angles = angles / tensors["rope_freqs.weight"].data
    assert np.allclose(angles, LlamaRotaryEmbedding(config).inv_freq.numpy(), rtol=1e-5)


def changed(source: Path, folder: Path, change) -> Path:
    """A copy of an exported folder with another config.json."""
    shutil.copytree(source, folder)
    config = json.loads((source / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@dataclasses.dataclass
class Keys:
    """A stand-in for gguf.GGUFWriter that keeps what it is given."""

    values: dict[str, object] = dataclasses.field(default_factory=dict)

    def __getattr__(self, name: str):
        return lambda value: self.values.__setitem__(name.removeprefix("add_"), value)


def llama_cpp_ids(keys: dict, text: str) -> list[int]:
    """The tokens of a prompt as llama.cpp makes them of a file's keys, with 0 <= ids, and -1 for an image.

    Source: llama.cpp's tokenizer for SPM, and mtmd_tokenize, which tokenizes what is between images by itself.
    """
    ids = {token: i for i, token in enumerate(keys["token_list"])}
    added = [t for t, kind in zip(keys["token_list"], keys["token_types"]) if kind in (2, 3, 4)]
    special = re.compile("(" + "|".join(map(re.escape, sorted(added, key=len, reverse=True))) + ")")
    found = [keys["bos_token_id"]] if keys["add_bos_token"] else []
    for index, chunk in enumerate(text.split(MARK)):
        found += [-1] if index else []
        after_special = True
        for piece in special.split(chunk):
            if piece in added:
                found.append(ids[piece])
                after_special = True
            elif piece:
                space = " " if keys["add_space_prefix"] and after_special else ""
                found += joined((space + piece).replace(" ", "▁"), ids, keys["token_scores"])
                after_special = False
    return found


def joined(text: str, ids: dict[str, int], scores: list[float]) -> list[int]:
    """Join neighbours whose text is a token, the best score first and the leftmost of equals."""
    parts = list(text)
    while True:
        pairs = [(-scores[ids[a + b]], i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in ids]
        if not pairs:
            break
        _, i = min(pairs)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    return [i for part in parts for i in ([ids[part]] if part in ids else [ids[f"<0x{b:02X}>"] for b in part.encode()])]


def keys_of(name_or_path: str, version: str) -> dict:
    """The keys of a tokenizer's part of a file."""
    trained = open_tokenizer(name_or_path)
    tokenizer, _ = hf_tokenizer(trained, (IMAGE_TOKEN,), True)
    plan = dataclasses.make_dataclass("Plan", ["args", "template", "model"])
    model = dataclasses.make_dataclass("Model", ["tokenizer"])
    keys = Keys()
    args = ModelArguments(version=version)
    add_tokenizer(keys, plan(args, None, model(trained)), tokenizer, len(tokenizer) + 2)
    assert keys.values["token_list"][-1].startswith("[PAD") and keys.values["token_types"][-1] == 5
    return keys.values


def written(template: str, talk: list[Message], typed: bool = False) -> str:
    """A file's chat template as llama.cpp renders it: images are marks in the text, or in parts of it."""
    chat = []
    for message in talk:
        text = message.text.replace(f"{IMAGE_TOKEN}\n", MARK).replace(IMAGE_TOKEN, MARK)
        if typed:
            text = [{"type": "text", "text": part} for part in re.split(f"({MARK})", text) if part]
        chat.append({"role": ROLES.get(message.role, message.role), "content": text})
    return jinja2.Environment().from_string(template).render(messages=chat, add_generation_prompt=True)


TALK = [Message("human", "<image>\nWhat is it?"), Message("gpt", "A red cat."), Message("human", "Why, 猫  and 1<2?")]


@pytest.mark.parametrize("name", ["tiny", "llama_slow_legacy", "llama_slow_nolegacy", "vicuna_split_nolegacy"])
def test_prompts_have_trainings_tokens(name, toy):
    path = str(toy / "llava_tokenizer") if name == "tiny" else str(GOLDENS / name)
    keys = keys_of(path, "v1")
    encoder = Encoder(open_tokenizer(path), EncodingOptions("v1", 2048))
    # Behind an answer's </s>, llama.cpp writes a space that tokenizers without legacy have at a text's beginning only.
    talks = [TALK[:1], TALK[2:], TALK] if "nolegacy" not in name else [TALK[:1], TALK[2:]]
    for talk in talks:
        expected = encoder.prompt_ids(talk, [1] * sum(message.text.count(IMAGE_TOKEN) for message in talk))
        found = llama_cpp_ids(keys, written(keys["chat_template"], talk))
        assert found == [-1 if i == IMAGE_TOKEN_INDEX else i for i in expected]


@pytest.mark.parametrize("template", [name for name, rules in TEMPLATES.items() if rules.write and name != "plain"])
def test_chat_templates_and_modelfiles_write_the_trained_prompt(template):
    source = llama_cpp_template(template)
    for typed in (False, True):
        for talk in (TALK[:1], TALK, [Message("system", "Be brief."), *TALK]):
            expected = render_prompt(talk, template).replace(IMAGE_TOKEN, MARK)
            assert written(source, talk, typed) == expected
    behind = [{"role": "user", "content": f"What is it?{MARK}"}]
    rendered = jinja2.Environment().from_string(source).render(messages=behind, add_generation_prompt=True)
    assert rendered == render_prompt(TALK[:1], template).replace(IMAGE_TOKEN, MARK)

    plan = dataclasses.make_dataclass("Plan", ["args", "template"])
    text = modelfile(plan(ModelArguments(version=template), None), ("a.gguf", "b.gguf"))
    assert text.startswith("FROM ./a.gguf\nFROM ./b.gguf\n")
    go = re.search(r'TEMPLATE """(.*?)"""', text, re.S)[1]
    system = found[1] if (found := re.search(r'SYSTEM """(.*?)"""', text, re.S)) else ""
    assert system == TEMPLATES[template].system
    first, last = executed(go, system, "Q1", " A1"), executed(go, "", "Q2", None)
    talk = [Message("human", "Q1"), Message("gpt", "A1"), Message("human", "Q2")]
    assert executed(go, system, "Q1", None) == render_prompt(talk[:1], template)
    space = " " if "".join(s.text for s in render(talk[:2], template)).split("A1")[0].endswith(" ") else ""
    assert first.replace(" A1", f"{space}A1") + last == render_prompt(talk, template)


def executed(template: str, system: str, prompt: str, response: str | None) -> str:
    """What Ollama makes of its template for one question; it ends at .Response where an answer is to come."""
    parts = re.fullmatch(r"\{\{ if \.System \}\}(.*)\{\{ else \}\}(.*)\{\{ end \}\}(.*)", template, re.S)
    rest = parts[3] if response is not None else parts[3].split("{{ .Response }}")[0]
    text = (parts[1] if system else parts[2]) + rest
    for name, value in (("System", system), ("Prompt", prompt), ("Response", response or "")):
        text = text.replace(f"{{{{ .{name} }}}}", value)
    return text


def test_byte_level_tokenizers(qwen, tmp_path):
    fields = fields_of(converted(qwen, tmp_path / "gguf"))
    model = json.loads((qwen / "tokenizer.json").read_text())["model"]
    assert (fields["tokenizer.ggml.model"], fields["tokenizer.ggml.pre"]) == ("gpt2", "gpt-2")
    assert [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]] == [tuple(m) for m in model["merges"]]
    assert fields["tokenizer.ggml.tokens"][: len(model["vocab"])] == sorted(model["vocab"], key=model["vocab"].get)
    assert not fields["tokenizer.ggml.add_bos_token"] and "<__media" in fields["tokenizer.chat_template"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("unigram", "takes sentencepiece's BPE with bytes and byte-level BPE, this is Unigram"),
        ("pattern", "takes byte-level tokenizers that divide a text as GPT-2, Llama 3, Qwen 2 or SmolLM does"),
        ("joins", "llama.cpp would read 'ab' as one token, and the tokenizer reads"),
        ("apart", "llama.cpp can't distinguish the separate merges to 'abc'"),
        ("bytes", "needs a token for every byte, 1 are missing"),
    ],
)
def test_tokenizers_that_llama_cpp_would_read_otherwise_are_refused(name, message, toy, qwen, tmp_path):
    source, folder = (qwen if name == "pattern" else toy) / "llava_tokenizer", tmp_path / "tokenizer"
    folder.mkdir()
    for file in source.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    content = json.loads((folder / "tokenizer.json").read_text())
    model = content["model"]
    if name == "unigram":
        content["model"] = {"type": "Unigram", "unk_id": 0, "vocab": [[token, 0.0] for token in model["vocab"]]}
    elif name == "pattern":
        content["pre_tokenizer"] = {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": "[a-z]+"}, "behavior": "Isolated", "invert": False},
                {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
            ],
        }
    elif name == "bytes":
        model["vocab"]["<none>"] = model["vocab"].pop("<0x07>")
    else:
        tokens = ["ab"] if name == "joins" else ["ab", "bc", "abc", "qx"]
        merges = {"joins": [], "apart": ["a b", "b c", "ab c", "q x", "a bc"]}[name]
        new = [token for token in tokens if token not in model["vocab"]]
        model["vocab"] |= {token: len(model["vocab"]) + i for i, token in enumerate(new)}
        known = [tuple(merge) for merge in model["merges"] if "".join(merge) not in tokens]
        model["merges"] = [[*merge] for merge in known] + [merge.split(" ") for merge in merges]
    (folder / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=re.escape(message)):
        keys_of(str(folder), "v1")


def test_models_that_llama_cpp_does_not_have_are_refused(toy, tmp_path, monkeypatch):
    def refused(change, message: str, *flags: str) -> None:
        source = changed(toy, tmp_path / f"refused {len(list(tmp_path.iterdir()))}", change)
        with pytest.raises(ConfigError, match=message):
            converted(source, tmp_path / "no", *flags)
        assert not (tmp_path / "no").exists()

    def rope(config: dict) -> None:
        config["text_config"]["rope_parameters"] = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}

    refused(rope, "not possible: the language model's positions are dynamic, expected default, linear or llama3")
    refused(lambda c: c["text_config"].update(hidden_act="gelu"), "the language model has gelu, expected silu")
    refused(lambda c: c["vision_config"].update(hidden_act="relu"), "the tower has relu, expected quick_gelu or gelu")
    refused(lambda c: c.update(vision_feature_select_strategy="full"), "keeps the class token")
    refused(lambda c: c.update(llava_ds_version="plain"), "--version plain has no questions")
    refused(lambda c: None, "--format gguf has no bfloat16: give one of float32, float16, q8_0", "--dtype", "bfloat16")
    with pytest.raises(ConfigError, match="--dtype q8_0 goes with --format gguf"):
        run_script("export.py", toy, "--dtype", "q8_0", "--output_dir", tmp_path / "no")

    weights = load_file(toy / "model.safetensors")
    weights["language_model.lm_head.weight"][0, 0] = 7e4
    source = changed(toy, tmp_path / "large", lambda config: None)
    save_file(weights, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"output.weight has a weight of 70000, beyond float16's range: give --dtype"):
        converted(source, tmp_path / "no", "--dtype", "float16")
    assert not (tmp_path / "no").exists()

    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "gguf" else find_spec(name, *rest)
    )
    refused(lambda config: None, r"needs the package gguf: pip install 'llava_ds\[gguf\]'")


@pytest.mark.parametrize(
    ("base", "ratio", "merge", "message"),
    [
        ({"family": "phi3"}, "pad", "flat", "the language model is a phi3, expected one of llama, mistral, qwen2"),
        ({"family": "mixtral"}, "pad", "flat", "the language model is a mixtral"),
        ({"tower": "siglip"}, "pad", "flat", "the tower is a siglip_vision_model, expected CLIP"),
        ({}, "anyres", "spatial_unpad", "images become tiles or get newlines"),
    ],
)
def test_other_parts_are_refused(base, ratio, merge, message, tmp_path):
    base = dict(base)
    tower = base.pop("tower", None)
    flags = toys.write_base(tmp_path / "base", **base)
    if tower is not None:
        flags |= toys.write_tower(tmp_path / "tower", tower)
    args = ModelArguments(**flags, mm_patch_merge_type=merge)
    plan = plan_model(args, 512)
    model = build_model(plan, args, {"zero_optimization": {"stage": 0}}, torch.float32, 0, RANKS)
    options = toys.image_options(
        aspect_ratio=ratio, merge_type=merge, **({"pinpoints": ((48, 24),)} if ratio == "anyres" else {})
    )
    export(model, plan, args, options, tmp_path / "hf")
    with pytest.raises(ConfigError, match=message):
        converted(tmp_path / "hf", tmp_path / "no")


def test_parameters_that_ask_for_gradients_are_written_too(tmp_path):
    """As a checkpoint's merged and trained weights may."""
    args = ModelArguments(**toys.write_base(tmp_path / "base"))
    plan = plan_model(args, 512)
    model = build_model(plan, args, {"zero_optimization": {"stage": 0}}, torch.float32, 0, RANKS)
    options = toys.image_options(aspect_ratio="pad")
    export(model, plan, args, options, tmp_path / "hf")
    entries = [Entry(name, tuple(p.shape), lambda p=p: p.requires_grad_()) for name, p in model.named_parameters()]
    (tmp_path / "gguf").mkdir()
    write_folder(
        export_plan(model, plan, args, options, form="gguf", matrix_type="float32"), entries, tmp_path / "gguf"
    )
    expected, found = tensors_of(converted(tmp_path / "hf", tmp_path / "other")), tensors_of(tmp_path / "gguf")
    assert expected.keys() == found.keys()
    assert all(np.array_equal(found[name].data, tensor.data) for name, tensor in expected.items())


def test_a_sliding_window_bounds_the_context(tmp_path):
    args = ModelArguments(**toys.write_base(tmp_path / "base", family="mistral"))
    plan = plan_model(args, 512)
    model = build_model(plan, args, {"zero_optimization": {"stage": 0}}, torch.float32, 0, RANKS)
    export(model, plan, args, toys.image_options(), tmp_path / "hf")
    assert fields_of(converted(tmp_path / "hf", tmp_path / "gguf"))["llama.context_length"] == 17
