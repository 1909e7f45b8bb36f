"""Rows that --resize_token_embeddings added: in every form of export, in folders that are converted, and in answers."""

import json
import runpy
from pathlib import Path

import pytest
import torch
import toys
from exporting import RANKS, export
from launching import ROOT
from llavas import STAGE_0, arguments
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText, AutoTokenizer

from llava_ds.constants import ConfigError, DataError
from llava_ds.data.sample import Message
from llava_ds.engine.construct import build_model
from llava_ds.export.export_plan import export_format
from llava_ds.extensions.benchmarks.asking import plan_batches
from llava_ds.extensions.benchmarks.question import Question
from llava_ds.extensions.infer.generate import Prompt, prompt_ids
from llava_ds.extensions.infer.load import load_model
from llava_ds.model.open.model_plan import plan_model

ADDED = ("<open>", "<close>", "<lift>")
ENDS = {
    "hf": ("language_model.model.embed_tokens.weight", "language_model.lm_head.weight"),
    "llava": ("model.embed_tokens.weight", "lm_head.weight"),
}


def convert(*arguments: object) -> None:
    """run/export.py in this process."""
    runpy.run_path(str(ROOT / "run" / "export.py"))["main"]([*map(str, arguments)])


def exported(folder: Path, form: str, vocab_size: int = 400, **flags: object):
    """(model, its plan, folder of the export, flags of the base) of a language model with added tokens."""
    base = toys.write_base(folder / "base", vocab_size=vocab_size)
    toys.add_plain_tokens(Path(base["model_name_or_path"]), *ADDED)
    args = arguments({**base, "resize_token_embeddings": True, **flags})
    plan = plan_model(args.model, 512)
    model = build_model(plan, args.model, STAGE_0, torch.float32, 0, RANKS)
    export(model, plan, args.model, plan.tower.image_options(args), folder / form, form)
    return model, plan, folder / form, base


def settings(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize(
    ("form", "vocab_size", "multiple", "rows", "written"),
    [
        ("hf", 400, None, 403, 404),  # <image> comes behind them
        ("hf", 400, 64, 448, 448),
        ("hf", 400, 13, 403, 416),  # full to the last row, so that <image> needs the next multiple
        ("hf", 500, None, 500, 500),
        ("llava", 400, None, 403, 403),
        ("llava", 400, 64, 448, 448),
    ],
)
def test_the_export_has_the_rows_and_the_tokens(tmp_path, form, vocab_size, multiple, rows, written):
    model, plan, folder, base = exported(tmp_path, form, vocab_size, pad_embeddings_to_multiple_of=multiple)
    text = settings(folder).get("text_config", settings(folder))
    assert plan.text_config.vocab_size == rows and text["vocab_size"] == written
    tensors, ends = load_file(folder / "model.safetensors"), ENDS[form]
    for name, end in zip(ends, (model.language_model.model.embed_tokens, model.language_model.lm_head)):
        found = next(tensor for key, tensor in tensors.items() if key.endswith(name))
        assert len(found) == written and torch.equal(found[:rows], end.weight)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert [tokenizer.convert_tokens_to_ids(token) for token in ADDED] == [400, 401, 402]
    loaded = load_model(folder, **({} if form == "hf" else {"moved": {"vision_tower": base["vision_tower"]}}))
    assert "without a row" not in "".join(loaded.notes)
    assert 402 in prompt_ids(loaded, Prompt((Message("human", "Now <lift> it."),), ()))


def test_what_is_asked_of_a_model_without_the_rows_is_refused(tmp_path):
    """Its embedding never grew (the export adds rows up to that of <image>, which nothing trained), or its tokenizer
    was changed afterwards."""
    write_ready = pytest.importorskip("ready_models").write_ready
    folder = exported(tmp_path / "never", "hf", resize_token_embeddings=False)[2]
    assert settings(folder)["text_config"]["vocab_size"] == 404 and settings(folder)["llava_ds_vocab_size"] == 400
    later = exported(tmp_path / "later", "hf")[2]
    assert load_model(later).notes == ()
    toys.add_plain_tokens(later, "<drop>")
    ready = tmp_path / "ready"
    write_ready(ready, "idefics3")
    toys.add_plain_tokens(ready, "<lift>")
    for path, token in ((folder, "<lift>"), (later, "<drop>"), (ready, "<lift>")):
        loaded = load_model(path)
        [note] = loaded.notes
        assert "rows of the model's embedding" in note and f"{token!r} (id " in note and "<image>" not in note
        assert prompt_ids(loaded, Prompt((Message("human", "Now what?"),), ()))
        with pytest.raises(DataError, match=rf"the text spells the token '{token}' \(id "):
            prompt_ids(loaded, Prompt((Message("human", f"Now {token} it."),), ()))
    asked = {"a": "Go.", "b": "Now <lift>."}
    questions = [Question(id, Prompt((Message("human", text),), ()), text, "") for id, text in asked.items()]
    with pytest.raises(DataError, match="question b: the text spells the token '<lift>'"):
        plan_batches(loaded, questions, 2, RANKS)
    config = settings(folder)
    (folder / "config.json").write_text(json.dumps({**config, "llava_ds_vocab_size": "400"}))
    with pytest.raises(ConfigError, match=r"config\.json says llava_ds_vocab_size '400', expected a number of rows"):
        load_model(folder)


@pytest.mark.parametrize("family", ["smolvlm", "gemma3", "gemma4_e", "qwen2_5_vl"])
def test_a_ready_folder_is_grown_by_a_command(tmp_path, family):
    """What the model computes of old tokens stays, and a new one is as probable as the mean of logits says."""
    write_ready = pytest.importorskip("ready_models").write_ready
    write_ready(tmp_path / "base", family)
    before = AutoModelForImageTextToText.from_pretrained(tmp_path / "base").eval()
    old = before.config.get_text_config().vocab_size
    toys.add_plain_tokens(tmp_path / "base", *ADDED)
    grows = ["--resize_token_embeddings", "--pad_embeddings_to_multiple_of", "8", "--output_dir", tmp_path / "grown"]
    convert(tmp_path / "base", *grows)
    after, report = AutoModelForImageTextToText.from_pretrained(tmp_path / "grown", output_loading_info=True)
    assert not any(report[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    rows = -(-(old + 3) // 8) * 8
    assert after.config.get_text_config().vocab_size == rows
    ids = torch.arange(10, 40)[None]
    with torch.no_grad():
        one, other = before(input_ids=ids).logits, after.eval()(input_ids=ids).logits
        assert other.shape[-1] == rows
        torch.testing.assert_close(other[..., :old], one)
        if family == "smolvlm":  # without a soft cap behind the output layer
            torch.testing.assert_close(other[..., old], one.mean(-1))
        assert after(input_ids=torch.tensor([[10, old + 2]])).logits.isfinite().all()
    assert load_model(tmp_path / "grown").notes == ()


def test_flags_of_rows_that_change_nothing_are_refused(tmp_path):
    write_ready = pytest.importorskip("ready_models").write_ready
    write_ready(tmp_path / "base", "smolvlm")
    with pytest.raises(ConfigError, match="--pad_embeddings_to_multiple_of has no effect without --resize_token_emb"):
        convert(tmp_path / "base", "--pad_embeddings_to_multiple_of", "8", "--output_dir", tmp_path / "grown")


def test_tokens_that_llavas_format_would_lose_are_refused(tmp_path):
    """Tokens that were added to an exported folder are not in the files from before its export."""
    _, _, folder, base = exported(tmp_path, "hf")
    there = ["--format", "llava", "--vision_tower", base["vision_tower"]]
    convert(folder, *there, "--output_dir", tmp_path / "back")
    assert settings(tmp_path / "back")["vocab_size"] == 403
    toys.add_plain_tokens(folder, "<drop>")
    with pytest.raises(
        ConfigError, match=r"llava_tokenizer, but 1 tokens of .* are missing there \(such as '<drop>'\): keep"
    ):
        convert(folder, *there, "--resize_token_embeddings", "--output_dir", tmp_path / "lost")
    args = arguments({"model_name_or_path": str(folder), "resize_token_embeddings": True})
    plan = plan_model(args.model, 512)
    for flags in ({"export_format": "llava"}, {"mm_projector_type": "linear"}):
        given = args.replaced(**flags)
        with pytest.raises(ConfigError, match=r"but 1 tokens of .* are missing there"):
            export_format(given, plan, plan.tower.image_options(given))
    convert(folder, "--resize_token_embeddings", "--output_dir", tmp_path / "kept")
    assert settings(tmp_path / "kept")["text_config"]["vocab_size"] == 405
    assert 404 in prompt_ids(load_model(tmp_path / "kept"), Prompt((Message("human", "<drop> it."),), ()))
