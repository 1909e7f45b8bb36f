"""Tokens around pictures that are new to a tokenizer: LLaVA's ids and rows, in embedding and output layer."""

import dataclasses
import json
import re
import shutil
from pathlib import Path

import pytest
import torch
import toys
from known_flags import needs
from llavas import RANKS, STAGE_0, opened
from safetensors.torch import load_file

from llava_ds.config.arguments import ModelArguments
from llava_ds.constants import ConfigError, DataError
from llava_ds.data.encode import Encoder, EncodingOptions
from llava_ds.data.sample import Message
from llava_ds.engine.construct import build_model
from llava_ds.model.open.model_plan import plan_model
from llava_ds.model.open.rows import Resized, Rows
from llava_ds.model.open.weights import TensorSource

MARKS = ["<im_patch>", "<im_start>", "<im_end>"]


def llavas_rows(weight: torch.Tensor, length: int, num_new: int) -> torch.Tensor:
    """What LLaVA's initialize_vision_tokenizer makes of a matrix: resized to the tokenizer's length, then the mean."""
    resized = torch.zeros(length, weight.shape[1])
    kept = min(length, len(weight))
    resized[:kept] = weight[:kept]
    resized[-num_new:] = resized[:-num_new].mean(0)
    return resized


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> dict[str, str]:
    return toys.write_base(tmp_path_factory.mktemp("base"))


@pytest.mark.parametrize(
    ("flags", "tokens"),
    [
        ({"mm_use_im_patch_token": True}, MARKS[:1]),
        ({"mm_use_im_start_end": True}, MARKS[1:]),
        ({"mm_use_im_patch_token": True, "mm_use_im_start_end": True}, MARKS),
    ],
)
def test_new_tokens_are_the_last_and_their_rows_the_mean(flags, tokens, base, capsys):
    before = load_file(Path(base["model_name_or_path"]) / "model.safetensors")
    length = len(before["lm_head.weight"])
    model, plan, _ = opened({**base, **flags})
    assert plan.tokenizer.convert_tokens_to_ids(tokens) == list(range(length, length + len(tokens)))
    text = model.language_model
    assert text.config.vocab_size == plan.text_config.vocab_size == length + len(tokens)
    for module, name in ((text.model.embed_tokens, "model.embed_tokens.weight"), (text.lm_head, "lm_head.weight")):
        torch.testing.assert_close(module.weight, llavas_rows(before[name], length + len(tokens), len(tokens)))
        assert torch.equal(module.weight[:length], before[name])
    rows = f"{length + len(tokens)} rows of vocabulary, the last for {', '.join(tokens)}, set to the mean of the others"
    assert rows in capsys.readouterr().out


def test_a_padded_vocabulary_is_cut_to_the_tokenizers_as_llava_does(tmp_path):
    base = toys.write_base(tmp_path, vocab_size=512)
    length = len(opened(base)[1].tokenizer)
    before = load_file(Path(base["model_name_or_path"]) / "model.safetensors")["model.embed_tokens.weight"]
    model, plan, _ = opened({**base, "mm_use_im_start_end": True})
    assert plan.text_config.vocab_size == length + 2 < 512
    embedding = model.language_model.model.embed_tokens.weight
    torch.testing.assert_close(embedding, llavas_rows(before, length + 2, 2))


def test_tied_embeddings_get_one_row_for_both(tmp_path):
    base = toys.write_qwen_base(tmp_path)
    length = len(opened(base)[1].tokenizer)
    model, _, _ = opened({**base, "mm_use_im_start_end": True})
    text = model.language_model
    assert text.lm_head.weight is text.model.embed_tokens.weight and len(text.lm_head.weight) == length + 2
    torch.testing.assert_close(text.lm_head.weight[-1], text.lm_head.weight[:-2].mean(0))


def test_known_tokens_change_nothing(tmp_path):
    base = toys.write_base(tmp_path / "base")
    folder = Path(base["model_name_or_path"])
    shutil.copytree(folder, tmp_path / "known")
    toys.add_tokens(tmp_path / "known", "<im_start>", "<im_end>")
    model, plan, _ = opened({**base, "mm_use_im_start_end": True})
    model.language_model.save_pretrained(tmp_path / "known")
    known = {**base, "model_name_or_path": str(tmp_path / "known")}
    again, other, _ = opened({**known, "mm_use_im_start_end": True})
    assert len(other.tokenizer) == len(plan.tokenizer)
    assert torch.equal(again.language_model.lm_head.weight, model.language_model.lm_head.weight)


def test_marks_stand_around_the_picture(base):
    _, plan, args = opened({**base, "mm_use_im_start_end": True})
    encoder = Encoder(plan.tokenizer, EncodingOptions("v1", 512, args.model.mm_use_im_start_end))
    talk = [Message("human", "<image>\nWhat?"), Message("gpt", "A cat.")]
    ids = encoder.encode_batch([(talk, [3])])[0].input_ids.tolist()
    first, last = plan.tokenizer.convert_tokens_to_ids(["<im_start>", "<im_end>"])
    assert ids[ids.index(first) : ids.index(last) + 1] == [first, -200, -200, -200, last]


def projector_file(path: Path, embedding: torch.Tensor | None) -> str:
    torch.manual_seed(2)
    tensors = {
        "model.mm_projector.0.weight": torch.randn(32, 16), "model.mm_projector.0.bias": torch.randn(32),
        "model.mm_projector.2.weight": torch.randn(32, 32), "model.mm_projector.2.bias": torch.randn(32),
    }  # fmt: skip
    torch.save(tensors if embedding is None else {**tensors, "model.embed_tokens.weight": embedding}, path)
    return str(path)


def test_a_projectors_file_brings_the_new_rows_in_both_shapes(base, tmp_path):
    length = len(load_file(Path(base["model_name_or_path"]) / "model.safetensors")["lm_head.weight"])
    flags = {**base, "mm_use_im_start_end": True}
    for rows in (2, length + 2):
        learned = torch.randn(rows, 32)
        path = projector_file(tmp_path / f"{rows}.bin", learned)
        model, _, _ = opened({**flags, "pretrain_mm_mlp_adapter": path})
        embedding = model.language_model.model.embed_tokens.weight
        assert torch.equal(embedding[-2:], learned[-2:])
        output = model.language_model.lm_head.weight
        torch.testing.assert_close(output[-1], output[:-2].mean(0))
    for rows in (3, length + 1):
        path = projector_file(tmp_path / "wrong.bin", torch.randn(rows, 32))
        with pytest.raises(DataError, match=rf"wrong.bin holds an embedding of shape \({rows}, 32\), the model needs"):
            opened({**flags, "pretrain_mm_mlp_adapter": path})
    path = projector_file(tmp_path / "without.bin", None)
    model, _, _ = opened({**flags, "pretrain_mm_mlp_adapter": path})
    embedding = model.language_model.model.embed_tokens.weight
    torch.testing.assert_close(embedding[-1], embedding[:-2].mean(0))


ADDED = ("<left>", "<right>", "<grasp>")


def grown_base(folder: Path, family: str, **changed: object) -> dict[str, str]:
    base = toys.write_qwen_base(folder) if family == "tied" else toys.write_base(folder, family=family, **changed)
    toys.add_plain_tokens(Path(base["model_name_or_path"]), *ADDED)
    return base


def tensors_in(folder: str) -> dict[str, torch.Tensor]:
    return load_file(Path(folder) / "model.safetensors")


def check_ends(text: torch.nn.Module, before: dict[str, torch.Tensor], old: int, rows: int) -> None:
    """Old rows of every parameter with a row per token are those in the files, new ones their mean."""
    ends = {p for end in (text.get_input_embeddings(), text.get_output_embeddings()) for p in end.parameters()}
    named = {name: p for name, p in text.named_parameters() if p in ends}
    assert named
    for name, parameter in named.items():
        assert len(parameter) == rows and torch.equal(parameter[:old], before[name]), name
        mean = before[name].mean(0)
        torch.testing.assert_close(parameter[old:], mean.expand(rows - old, *mean.shape), msg=name)


@pytest.mark.parametrize("multiple", [None, 64])
@pytest.mark.parametrize("family", ["llama", "tied", "gpt2", "qwen2_moe"])
def test_rows_grow_for_added_tokens(tmp_path, family, multiple, capsys):
    """Untied, tied under two names, and a mixture."""
    base = grown_base(tmp_path, family)
    before = tensors_in(base["model_name_or_path"])
    plain = opened(base)[1]
    old = plain.text_config.vocab_size
    assert "'<left>' (id" in "".join(plain.notes) and "--resize_token_embeddings True adds rows" in "".join(plain.notes)
    model, plan, _ = opened({**base, "resize_token_embeddings": True, "pad_embeddings_to_multiple_of": multiple})
    rows = old + 3 if multiple is None else -(-(old + 3) // 64) * 64
    assert plan.text_config.vocab_size == model.language_model.config.vocab_size == rows
    check_ends(model.language_model, before, old, rows)
    padded = "" if multiple is None else ", a multiple of 64"
    [line] = plan.notes
    assert line.startswith(
        f"--resize_token_embeddings True: {rows} rows of embedding and output layer{padded}, {old} before; the "
        f"tokenizer needs {old + 3}; new rows start as the mean of the others"
    )
    assert f"{rows} rows of vocabulary, the last {rows - old} of them new, set to the mean" in capsys.readouterr().out


@pytest.mark.parametrize("family", ["smolvlm", "gemma3", "gemma4_e", "qwen2_vl", "internvl"])
def test_rows_of_ready_models_grow(tmp_path, family):
    """With embeddings of layers, too; and with the language model's settings on the first level of config.json."""
    write_ready = pytest.importorskip("ready_models").write_ready
    given = {**write_ready(tmp_path, family), "version": "processor"}
    old = plan_model(ModelArguments(**given), 64).text_config.vocab_size
    toys.add_plain_tokens(tmp_path, *ADDED)
    args = ModelArguments(**given, resize_token_embeddings=True, pad_embeddings_to_multiple_of=8)
    plan = plan_model(args, 64)
    rows = -(-(old + 3) // 8) * 8
    before = {
        name: read() for name, read in dataclasses.replace(plan.sources.language_model, changes=()).open().tensors()
    }
    model = build_model(plan, args, STAGE_0, torch.float32, 0, RANKS)
    check_ends(model.language_model, before, old, rows)
    if family == "gemma4_e":
        name = "model.embed_tokens_per_layer.weight"
        table = model.language_model.get_parameter(name)
        assert (
            torch.equal(table[:old], before[name]) and len(table) == plan.text_config.vocab_size_per_layer_input == rows
        )
        torch.testing.assert_close(table[-1], before[name].mean(0))


def test_a_bias_of_the_output_layer_grows_with_it():
    """As of Phi 1.5: the mean, too, where rows only grow; zero for LLaVA's tokens."""
    torch.manual_seed(0)
    below = {"embed.weight": torch.randn(5, 4), "head.weight": torch.randn(5, 4), "head.bias": torch.randn(5)}
    names = {"inputs": "embed.weight", "outputs": ("head.weight", "head.bias")}
    for rows, bias in (
        (Rows(8, (), **names, before=5), below["head.bias"].mean()),
        (Rows(8, ("<a>", "<b>", "<c>"), **names), torch.tensor(0.0)),
    ):
        found = {name: read() for name, read in Resized(TensorSource(below, "there"), rows=rows).tensors()}
        assert torch.equal(found["head.bias"][:5], below["head.bias"])
        torch.testing.assert_close(found["head.bias"][5:], bias.expand(3))
        torch.testing.assert_close(found["head.weight"][5:], below["head.weight"].mean(0).expand(3, -1))
    with pytest.raises(DataError, match=r"there: embed\.weight has 5 rows, and config.json says vocab_size 6"):
        Resized(TensorSource(below, "there"), rows=Rows(8, (), **names, before=6))


def test_no_row_is_cut_off_where_there_are_enough(tmp_path):
    base = toys.write_base(tmp_path, vocab_size=512)
    toys.add_plain_tokens(Path(base["model_name_or_path"]), *ADDED)
    before = tensors_in(base["model_name_or_path"])
    model, plan, _ = opened({**base, "resize_token_embeddings": True})
    assert plan.text_config.vocab_size == 512
    assert torch.equal(model.language_model.lm_head.weight, before["lm_head.weight"])
    [line] = plan.notes
    assert line.startswith("--resize_token_embeddings True adds no rows: the embedding has 512, the tokenizer needs 4")
    assert (
        opened({**base, "resize_token_embeddings": True, "pad_embeddings_to_multiple_of": 100})[
            1
        ].text_config.vocab_size
        == 600
    )


@pytest.mark.full
def test_tokens_of_ids_behind_a_gap_get_their_rows(tmp_path):
    """Published tokenizers have gaps: the number of tokens is less than the largest id."""
    base = toys.write_base(tmp_path)
    file = Path(base["model_name_or_path"]) / "tokenizer.json"
    content = json.loads(file.read_text())
    last = max(content["model"]["vocab"].values())
    for gap in (40, 1 << 30):
        content["model"]["vocab"]["grasp"] = last + gap
        file.write_text(json.dumps(content))
        if gap == 40:
            assert opened({**base, "resize_token_embeddings": True})[1].text_config.vocab_size == last + 41
            continue
        with pytest.raises(ConfigError, match=r"has \d+ tokens and the id 1,073,742,\d+: .* correct its files"):
            opened({**base, "resize_token_embeddings": True})


def test_rows_are_not_resized_twice(tmp_path):
    base = grown_base(tmp_path, "llama")
    for name in ("mm_use_im_start_end", "mm_use_im_patch_token"):
        with pytest.raises(
            ConfigError, match=f"--{name} True resizes the embedding to the tokenizer already, as in LLaVA"
        ):
            opened({**base, name: True, "resize_token_embeddings": True})
    assert not opened({**base, "mm_use_im_start_end": True})[1].notes  # LLaVA's resizing gives them rows, too


def test_a_folder_whose_embedding_is_not_its_configurations_is_refused(tmp_path):
    base = grown_base(tmp_path, "llama")
    file = Path(base["model_name_or_path"]) / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps({**config, "vocab_size": config["vocab_size"] + 3}))
    for flags in (
        {},
        {"resize_token_embeddings": True},
        {"resize_token_embeddings": True, "pad_embeddings_to_multiple_of": 512},
    ):
        with pytest.raises(DataError, match=r"correct config.json|the model needs"):
            opened({**base, **flags})


@pytest.mark.parametrize(
    ("flags", "frozen"),
    [
        ({}, None),
        (
            {"tune_mm_mlp_adapter": True},
            "model.embed_tokens.weight and lm_head.weight frozen.*give the flag again in the next",
        ),
        ({"mm_tunable_parts": "mm_vision_tower,mm_mlp_adapter"}, "model.embed_tokens.weight and lm_head.weight frozen"),
        ({"freeze_backbone": True}, "leave model.embed_tokens.weight frozen"),
        ({"unfreeze_topk_llm": 1, "mm_tunable_parts": "mm_mlp_adapter"}, "lm_head.weight frozen"),
    ],
)
def test_new_rows_that_stay_at_the_mean_are_named(tmp_path, flags, frozen):
    base = grown_base(tmp_path, "llama")
    notes = opened({**base, **flags, "resize_token_embeddings": True})[1].notes
    assert len(notes) == (1 if frozen is None else 2)
    assert frozen is None or re.search(frozen, notes[1])


@needs("moe_enable")
def test_experts_are_upcycled_under_grown_rows(tmp_path):
    base = grown_base(tmp_path, "llama")
    experts = {"moe_enable": True, "num_experts": 2, "top_k_experts": 1, "resize_token_embeddings": True}
    model, plan, _ = opened({**base, **experts})
    check_ends(model.language_model, tensors_in(base["model_name_or_path"]), 400, 403)
    assert len(plan.notes) > 1 and plan.notes[0].startswith("--resize_token_embeddings True: 403 rows")
