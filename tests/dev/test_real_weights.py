"""The converters and the split of make real, on tiny weights and stamps."""

import sys
from pathlib import Path

import gguf
import pytest
import torch
from launching import ROOT
from PIL import Image
from transformers import AutoModelForCausalLM, AutoTokenizer, Dinov2Config, Dinov2Model, LlamaConfig

from llava_ds.extensions.gguf.gguf_folder import interleaved


@pytest.fixture(autouse=True)
def real_on_path(monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path, str(ROOT / "run" / "dev")])


def write_tiny_gguf(file: Path) -> torch.nn.Module:
    """A random Llama with a byte-level tokenizer, whose MLPs are in Q8_0."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=258, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=True, max_position_embeddings=64,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).eval()
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(64)
    writer.add_block_count(2)
    writer.add_feed_forward_length(96)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_rope_dimension_count(16)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_tokenizer_model("gpt2")
    alphabet = sorted(
        {chr(i) for i in (*range(33, 127), *range(161, 173), *range(174, 256))} | set(map(chr, range(256, 324)))
    )
    writer.add_token_list([*alphabet, "ab", "<end>"])
    writer.add_token_types([gguf.TokenType.NORMAL] * 257 + [gguf.TokenType.CONTROL])
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(257)
    writer.add_chat_template("{{ messages[0].content }}")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2)
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight":
            continue
        if "q_proj" in name or "k_proj" in name:
            weight = interleaved(weight, 4 if "q_proj" in name else 2)
        data = weight.numpy()
        kind = gguf.GGMLQuantizationType.Q8_0 if "up_proj" in name else gguf.GGMLQuantizationType.F32
        if kind == gguf.GGMLQuantizationType.Q8_0:
            data = gguf.quants.quantize(data, kind)
            weight.copy_(torch.from_numpy(gguf.quants.dequantize(data, kind)))
        writer.add_tensor(names.get_name(name, (".weight",)), data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def test_a_gguf_becomes_a_folder_with_the_same_logits(tmp_path):
    from real.gguf_model import convert_gguf

    model = write_tiny_gguf(tmp_path / "tiny.gguf")
    convert_gguf(tmp_path / "tiny.gguf", tmp_path / "folder")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "folder")
    assert tokenizer.chat_template == "{{ messages[0].content }}"
    assert tokenizer.eos_token == "<end>"
    ids = torch.tensor([tokenizer("abcab").input_ids])
    assert ids[0].tolist()[0] == 256
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "folder")
    assert opened.dtype == torch.float32
    torch.testing.assert_close(opened(ids).logits, model(ids).logits)


def write_tiny_onnx(file: Path, left_out: str = "") -> Dinov2Model:
    """A random DINOv2 in the form in which torch's exporter writes one."""
    from real.onnx_tower import PREFIX, onnx_message
    from safetensors.torch import load_file

    torch.manual_seed(0)
    model = Dinov2Model(
        Dinov2Config(hidden_size=128, num_hidden_layers=2, num_attention_heads=2, image_size=28, patch_size=14)
    ).eval()
    model.save_pretrained(file.parent / "saved")
    graph = (onnx := onnx_message()).graph
    for number, (name, weight) in enumerate(load_file(file.parent / "saved" / "model.safetensors").items()):
        pieces = {f"{PREFIX}{name}": weight}
        if name == "embeddings.position_embeddings":
            pieces = {f"onnx::Add_{number}{i}": part for i, part in enumerate(weight.split([1, 4], 1))}
        elif weight.ndim == 2 and name.startswith("encoder."):
            pieces = {f"onnx::MatMul_{number}": weight.T}
            layer = f"{PREFIX}{name}".removesuffix(".weight").replace(".", "/").replace("layer/", "layer.")
            graph.node.add(name=f"/{layer}/MatMul", op_type="MatMul", input=["x", f"onnx::MatMul_{number}"])
        for each, part in pieces.items():
            if name != left_out and name != "embeddings.mask_token":
                data = part.contiguous().numpy()
                graph.initializer.add(name=each, dims=data.shape, data_type=1, raw_data=data.tobytes())
    file.write_bytes(onnx.SerializeToString())
    return model


def test_an_onnx_becomes_a_tower_with_the_same_features(tmp_path):
    from real.onnx_tower import convert_dinov2

    model = write_tiny_onnx(tmp_path / "tiny.onnx")
    convert_dinov2(tmp_path / "tiny.onnx", tmp_path / "tower", 42)
    images = torch.randn(2, 3, 28, 28)
    opened = Dinov2Model.from_pretrained(tmp_path / "tower").eval()
    assert torch.equal(opened(images).last_hidden_state, model(images).last_hidden_state)


def test_a_tensor_that_is_missing_is_named(tmp_path):
    from real.onnx_tower import convert_dinov2

    write_tiny_onnx(tmp_path / "tiny.onnx", left_out="encoder.layer.1.norm1.weight")
    with pytest.raises(ValueError, match=r"encoder\.layer\.1\.norm1\.weight"):
        convert_dinov2(tmp_path / "tiny.onnx", tmp_path / "tower", 42)


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("An albino peahen (a female peafowl, or peacock).", "an albino peahen"),
        ("Mars—the red planet.", None),
        ("A boxcar is used to carry livestock.", "a boxcar"),
        ("A candy cane is a traditional Christmas treat.", "a candy cane"),
        ("A “Fuji” apple.", "a Fuji apple"),
        ("Happy!", None),
    ],
)
def test_names_are_the_noun_phrases_that_texts_begin_with(line, name):
    from real.stamps import name_of

    assert name_of(line) == name


def test_an_object_is_on_one_side_wherever_its_pictures_lie(tmp_path):
    from real.stamps import read_stamps, split

    def write(where, line):
        file = tmp_path / where
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGBA", (4, 4), "red").save(file.with_suffix(".png"))
        file.with_suffix(".txt").write_text(f"{line}\nfr.utf8=...\n")

    for i in range(60):
        write(f"things/thing{chr(97 + i // 10)}{chr(97 + i % 10)}", f"A thing{chr(97 + i // 10)}{chr(97 + i % 10)}.")
    for where, line in {
        "people/eye_blue_left": "A blue eye.", "people/eye_green": "A green eye.", "clothes/hat1": "A big hat.",
        "seasonal/red-hat": "A festive cap.", "food/orange": "An orange.", "symbols/a": "A letter.",
    }.items():  # fmt: skip
        write(where, line)
    stamps = read_stamps(tmp_path)
    assert len(stamps) == 65  # symbols are left out
    for share in (0.15, 0.5, 0.85):
        sides = [{stamp.id for stamp in side} for side in split(stamps, share)]
        assert len(sides[0] | sides[1]) == 65 and not sides[0] & sides[1]
        for one, other in (("people/eye_blue_left", "people/eye_green"), ("clothes/hat1", "seasonal/red-hat")):
            assert (one in sides[0]) == (other in sides[0])
        assert abs(len(sides[1]) - share * 65) < 15
    fewer = split(stamps[::2], 0.5)
    assert {stamp.id for stamp in fewer[1]} == {stamp.id for stamp in stamps[::2]} & {
        stamp.id for stamp in split(stamps, 0.5)[1]
    }
