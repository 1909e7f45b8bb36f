"""Tokens around pictures that are new to a tokenizer: LLaVA's ids and rows, in embedding and output layer."""

import shutil
from pathlib import Path

import pytest
import torch
import toys
from llavas import opened
from safetensors.torch import load_file

from llava_ds.constants import DataError
from llava_ds.data.encode import Encoder, EncodingOptions
from llava_ds.data.sample import Message

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
    rows = f"{length + len(tokens)} rows of vocabulary, the last for {', '.join(tokens)}, as the mean of the others"
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
