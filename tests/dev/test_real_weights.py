"""The converters and the split of make real, on tiny weights and stamps."""

import re
import struct
import sys
import zlib
from collections import Counter
from pathlib import Path

import gguf
import pytest
import torch
from launching import ROOT
from PIL import Image
from transformers import (
    AutoImageProcessor,
    AutoModelForCausalLM,
    AutoTokenizer,
    Dinov2Config,
    Dinov2Model,
    InternVLForConditionalGeneration,
    LlamaConfig,
)

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


def test_a_tower_and_a_language_model_become_one_model_of_transformers(tmp_path):
    from real.gguf_model import convert_gguf
    from real.onnx_tower import convert_dinov2
    from real.whole_model import TOKENS, compose, set_projector, squares

    tower = write_tiny_onnx(tmp_path / "tiny.onnx")
    convert_dinov2(tmp_path / "tiny.onnx", tmp_path / "tower", 56)
    language = write_tiny_gguf(tmp_path / "tiny.gguf")
    convert_gguf(tmp_path / "tiny.gguf", tmp_path / "language_model")
    compose(tmp_path / "tower", tmp_path / "language_model", 56, tmp_path / "model")
    model = InternVLForConditionalGeneration.from_pretrained(tmp_path / "model").eval()
    pixels, ids = torch.randn(2, 3, 56, 56), torch.tensor([[97, 98, 99]])
    expected = tower(pixels, output_hidden_states=True).hidden_states[-2]
    assert torch.equal(model.model.vision_tower(pixel_values=pixels).last_hidden_state, expected)
    torch.testing.assert_close(model(input_ids=ids).logits[..., :258], language(ids).logits)
    inner, outer = torch.nn.Linear(128, 32), torch.nn.Linear(32, 64)
    set_projector(model, inner, outer)
    projected = model.model.get_image_features(pixel_values=pixels).pooler_output
    torch.testing.assert_close(projected, outer(inner(squares(model, pixels))))
    processor = AutoImageProcessor.from_pretrained(tmp_path / "model", backend="pil")
    shown = processor(images=[Image.new("RGB", (30, 20), "red")], return_tensors="pt")
    assert shown["pixel_values"].shape == (1, 3, 56, 56)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert set(TOKENS.values()) <= set(tokenizer.get_vocab())
    question = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "a or b?"}]}
    prompt = tokenizer.apply_chat_template([question], add_generation_prompt=True, tokenize=False)
    answered = tokenizer.apply_chat_template([question, {"role": "assistant", "content": "a"}], tokenize=False)
    assert prompt == "<|im_start|>user: <IMG_CONTEXT>\na or b?<|im_end|>\n<|im_start|>assistant:"
    assert answered == f"{prompt} a<|im_end|>\n"


def test_ridge_regression_in_two_layers_keeps_what_a_line_explains():
    from real.first_projector import _ridge

    torch.manual_seed(0)
    inputs, weight = torch.randn(400, 8) * 3 + 1, torch.randn(8, 10)
    weight[:, 5:] = weight[:, :5] @ torch.randn(5, 5)  # of rank 5, as many as the hidden layer has components
    targets = inputs @ weight + 7
    inner, outer = _ridge(inputs, targets, 1e-6)
    hidden = inner(inputs)
    assert hidden.shape == (400, 5)
    torch.testing.assert_close(hidden.std(0), torch.ones(5))
    torch.testing.assert_close(outer(hidden).mean(0), targets.mean(0), atol=1e-3, rtol=1e-4)
    made, wanted = outer(hidden) - outer(hidden).mean(0), targets - targets.mean(0)
    torch.testing.assert_close(made / made.std(), wanted / wanted.std(), atol=1e-3, rtol=1e-3)


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


NOUNS = """
  1 a licence
00000001 03 n 01 physical_entity 0 000 | an entity
00000002 03 n 02 animal 0 beast 0 001 @ 00000001 n 0000 | a living organism (not a plant); "a wild animal"
00000003 05 n 02 mouse 0 house_mouse 1 002 @ 00000002 n 0000 ~ 00000002 n 0000 | a small rodent; "it ran"
00000004 06 n 01 tow_truck 0 001 @ 00000001 n 0000 | a truck that tows
00000005 06 n 01 truck 0 001 @ 00000001 n 0000 | a vehicle
00000006 15 n 01 Paris 0 001 @i 00000001 n 0000 | a city
00000007 07 n 01 kindness 0 000 | a quality
00000008 06 n 01 down 0 001 @ 00000001 n 0000 | soft feathers
00000009 06 n 02 lorry 0 motor_lorry 0 001 @ 00000005 n 0000 | a British truck
"""


def write_wordnet(folder: Path) -> None:
    """A few nouns in WordNet's files. A mouse is first an animal, then a truck."""
    lines = [line for line in NOUNS.splitlines() if line]
    keys: dict[str, str] = {}
    for line in lines[1:]:
        fields = line.split()
        for word in fields[4 : 4 + 2 * int(fields[3], 16) : 2]:
            keys[word.lower()] = fields[0]
    index = [f"{word} n 1 1 @ 1 0 {key}" for word, key in keys.items() if word != "mouse"]
    folder.mkdir(parents=True)
    (folder / "data.noun").write_text("\n".join(lines) + "\n")
    (folder / "index.noun").write_text(
        "\n".join(["  1 a licence", *index, "mouse n 2 2 @ ~ 2 0 00000003 00000005"]) + "\n"
    )
    (folder / "noun.exc").write_text("mice mouse\n")
    (folder / "cntlist.rev").write_text("down%1:06:00:: 1 2\ndown%4:02:00:: 1 9\nmouse%1:05:00:: 1 3\n")


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("a grey mouse", ("mouse", "00000003")),
        ("three Mice", ("mouse", "00000003")),
        ("my tow trucks", ("tow truck", "00000004")),
        ("Eiffel in paris", None),  # a single thing
        ("great kindness", None),  # no physical thing
        ("going down", None),  # commoner as an adverb
        ("frobnicate", None),
        ("", None),
    ],
)
def test_a_phrase_ends_in_the_longest_noun_that_names_a_thing(words, found, tmp_path):
    from real.wordnet import WordNet

    write_wordnet(tmp_path / "wordnet")
    wordnet = WordNet(tmp_path / "wordnet")
    assert wordnet.find(words.split()) == found
    if found:
        assert wordnet.name(wordnet.kinds(found[1])[-1]) == "physical_entity"
    assert wordnet.gloss("00000002") == "a living organism"
    assert [*wordnet.things()] == [("mouse", "00000003")]  # the only thing in WordNet's texts


def write_resource(file: Path, files: dict[str, tuple[bytes, int]]) -> None:
    """Write a Qt resource of version 1 with a folder "images" and files in it: content and flags."""
    names, data, places = b"", b"", {}
    for name in ("images", *files):
        places[name] = len(names)
        names += struct.pack(">HI", len(name), 0) + name.encode("utf-16-be")
    entries = [struct.pack(">IHII", 0, 2, 1, 1), struct.pack(">IHII", places["images"], 2, len(files), 2)]
    for name, (content, flags) in files.items():
        stored = struct.pack(">I", len(content)) + zlib.compress(content) if flags == 1 else content
        entries.append(struct.pack(">IHHHI", places[name], flags, 0, 1, len(data)))
        data += struct.pack(">I", len(stored)) + stored
    tree = b"".join(entries)
    file.write_bytes(
        struct.pack(">4sIIII", b"qres", 1, 20, 20 + len(tree), 20 + len(tree) + len(data)) + tree + data + names
    )


def test_a_qt_resource_yields_its_files(tmp_path):
    from real.gcompris import read_resources

    write_resource(tmp_path / "a.rcc", {"dog.svg": (b"<svg/>" * 9, 1), "cat.webp": (b"RIFF", 0)})
    assert dict(read_resources(tmp_path / "a.rcc")) == {"/images/dog.svg": b"<svg/>" * 9, "/images/cat.webp": b"RIFF"}
    write_resource(tmp_path / "b.rcc", {"dog.svg": (b"x", 4)})
    with pytest.raises(ValueError, match="zstd"):
        dict(read_resources(tmp_path / "b.rcc"))
    (tmp_path / "c.rcc").write_bytes(b"PK\3\4" + bytes(20))
    with pytest.raises(ValueError, match=r"c\.rcc: not a Qt resource"):
        read_resources(tmp_path / "c.rcc")


def test_drawings_come_once_with_their_rare_keywords(tmp_path):
    from real.openclipart import read_drawings

    def write(where, title, *words):
        (tmp_path / where).parent.mkdir(parents=True, exist_ok=True)
        keys = "".join(f"<rdf:li>{word}</rdf:li>" for word in words)
        work = f"<cc:Work><dc:title>{title}</dc:title><dc:subject>{keys}</dc:subject></cc:Work>"
        (tmp_path / where).write_text(f"<svg>{work}</svg>")

    for i in range(21):
        write(f"tools/saw{i}.svg", f"Saw &amp; {i}", "tool", f"saw{i}")
    write("more/saw3.svg", "Saw again", "tool")
    write("shapes/star.svg", "Star")
    found = list(read_drawings(tmp_path))
    assert len(found) == 21
    assert sorted(each[0] for each in found if each[1].name == "saw3.svg") == ["more/saw3.svg"]
    assert all(title.startswith("Saw") and "tool" not in words for _, _, title, words in found)
    assert {words[0] for *_, words in found if words} == {f"saw{i}" for i in range(21) if i != 3}


@pytest.mark.parametrize(
    ("tag", "expected"),
    [
        ('<svg width="72pt" height="1in">', '<svg viewBox="0 0 96.000 96.000" width="96.000" height="96.000">'),
        ('<svg width="96px" height="10" viewBox="0 0 1 1">', '<svg width="96.000" height="10.000" viewBox="0 0 1 1">'),
        ('<svg width="100%" height="10">', '<svg width="100%" height="10">'),
        ("no drawing", "no drawing"),
    ],
)
def test_a_drawing_gets_a_size_in_pixels(tag, expected):
    from real.pictures import in_pixels

    assert in_pixels(f"<?xml?>{tag}</svg>") == f"<?xml?>{expected}</svg>"


def things(nouns: list[tuple[str, str, bool]]):
    from real.things import Thing, _groups

    groups = _groups([(noun, sense) for noun, sense, _ in nouns])
    picture = Image.new("RGBA", (4, 4), "red")
    return [Thing(str(i), *each[:2], picture, each[2], group) for i, (each, group) in enumerate(zip(nouns, groups))]


def test_a_noun_and_its_synonyms_are_on_one_side():
    from real.things import split

    linked = [("truck", "5", False), ("tow truck", "4", False), ("lorry", "5", False), ("lorry", "9", True)]
    found = things([(f"thing{i}", f"x{i}", False) for i in range(200)] + linked)
    for share in (0.2, 0.5, 0.8):
        sides = split(found, share, share)
        assert sum(map(len, sides)) == len(found) and abs(len(sides[1]) - 200 * share) < 30
        assert not {each.group for each in sides[0]} & {each.group for each in sides[1]}
        assert len({each in sides[0] for each in found[200:]}) == 1
    assert [each for each in split(found, 0, 1)[1]] == found[200:]  # a group with a photograph


def test_an_answer_without_looking_is_right_for_one_of_four():
    from real.quiz import quadruples

    asked = quadruples(things([(f"thing{i // 2}", f"x{i // 2}", False) for i in range(82)]), 3, seed=0)
    assert len(asked) == 3 * 40
    assert Counter(Counter(question for _, question in asked).values()) == {4: 30}
    for thing, question in asked:
        assert re.search(rf"\b{thing.noun}\b", question)
    first = [thing.noun == re.search(r": (\w+)", question)[1] for thing, question in asked]
    assert sum(first) == 30


def test_nouns_that_are_held_out_are_not_asked_for_by_definition():
    from real.quiz import defined

    class Nouns:
        def things(self):
            return [(f"thing{i}", f"x{i}") for i in range(40)] + [("tow thing3", "y")]

        def gloss(self, key):
            return f"what {key} means" + "." * 70 * (key == "x7")

    held_out = things([("big thing3", "z", False), ("other", "x4", False)])
    turns = defined(Nouns(), held_out, 200, seed=0)
    assert len(turns) == 200
    for question, answer in turns:
        gloss, nouns = re.fullmatch(r"It is what (\w+) means\. Which is it: (.*)\?", question).groups()
        asked = re.split(", | or ", nouns)
        assert len({*asked}) == 4 and answer in asked and gloss == answer.replace("thing", "x")
        assert not {"thing3", "tow thing3", "thing4", "thing7"} & {*asked}


def test_no_question_of_a_training_image_gives_a_later_answer_away(tmp_path):
    from real.quiz import Asker
    from real.wordnet import WordNet

    write_wordnet(tmp_path / "wordnet")
    wordnet = WordNet(tmp_path / "wordnet")
    found = things([("mouse", "00000003", False), ("tow truck", "00000004", False), ("lorry", "00000009", False),
                    ("down", "00000008", False)])  # fmt: skip
    asker, seen = Asker(found, wordnet, 0), Counter()
    for _ in range(300):
        turns = asker.turns(found[0])
        assert all("mouse" not in answer for _, answer in turns[:-1])
        seen[turns[0][0].split()[0], len(turns)] += 1
        if turns[0][0] == "Is it a kind of animal?":
            assert turns[0][1] == "yes"
    assert set(seen) == {("Which", 1), ("Is", 2), ("What", 1), ("How", 1)}


def test_the_probe_takes_nouns_from_unvaried_images():
    from probe_real import nouns_of, options
    from real.quiz import record

    choice, kind = ("Which is it: red car, owl, tin or axe?", "owl"), ("Is it a kind of bird?", "yes")
    records = [
        record("a", "a.0.png", [kind, choice]), record("b", "b.0.png", [("What is it?", "tin")]),
        record("c", "c.1.png", [choice]), record("d", "d.0.png", [kind]), record("e", None, [choice]),
    ]  # fmt: skip
    assert nouns_of(records) == {"a.0.png": "owl", "b.0.png": "tin"}
    assert options(record("c", "c.1.png", [choice])) == ["red car", "owl", "tin", "axe"]
