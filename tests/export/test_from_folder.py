"""LLaVA's format and transformers' are one model: there and back is bit-equal, and nothing that was added stays."""

import json
import runpy
from pathlib import Path

import pytest
import torch
import toys
from exporting import RANKS, export
from launching import ROOT
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from llava_ds.config.arguments import Arguments, DataArguments, ModelArguments, TrainingArguments
from llava_ds.constants import ConfigError
from llava_ds.engine.construct import build_model
from llava_ds.extensions.infer.load import load_model
from llava_ds.model.open.model_plan import plan_model

MODELS = {
    # (tower, language model, aspect ratio, merge type)
    "clip llama pad": ("clip", "llama", "pad", "flat"),
    "siglip qwen tied anyres": ("siglip", "qwen", "anyres", "spatial_unpad"),
    "clip llama tied onevision": ("clip", "llama tied", "anyres_max_4", "spatial_unpad"),
}
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json")


@pytest.fixture(scope="module", params=MODELS)
def trained(request, tmp_path_factory):
    """(model and what describes it, its tower's folder)."""
    tower, llm, ratio, merge = MODELS[request.param]
    folder = tmp_path_factory.mktemp("trained")
    base = toys.write_qwen_base(folder) if llm == "qwen" else toys.write_base(folder, tie_word_embeddings="tied" in llm)
    base |= toys.write_tower(folder / "tower", tower)
    args = Arguments(
        ModelArguments(**base, mm_patch_merge_type=merge, version="chatml" if llm == "qwen" else "v1"),
        DataArguments(image_aspect_ratio=ratio),
        TrainingArguments(),
        frozenset(),
    )
    plan = plan_model(args.model, 512)
    model = build_model(plan, args.model, {"zero_optimization": {"stage": 0}}, torch.float32, 0, RANKS)
    return (model, plan, args.model, plan.tower.image_options(args)), base["vision_tower"]


def convert(*arguments: object) -> None:
    """run/export.py in this process."""
    runpy.run_path(str(ROOT / "run" / "export.py"))["main"]([*map(str, arguments)])


def same_weights(a: Path, b: Path) -> bool:
    one, other = load_file(a / "model.safetensors"), load_file(b / "model.safetensors")
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def settings(folder: Path, name: str = "config.json") -> dict:
    return json.loads((folder / name).read_text())


def test_llavas_format_and_back(trained, tmp_path):
    described, tower = trained
    export(*described, tmp_path / "llava", "llava")
    convert(tmp_path / "llava", "--output_dir", tmp_path / "hf", "--vision_tower", tower)
    convert(tmp_path / "hf", "--format", "llava", "--output_dir", tmp_path / "again")
    assert same_weights(tmp_path / "llava", tmp_path / "again")
    assert settings(tmp_path / "llava") == settings(tmp_path / "again")
    for name in TOKENIZER:
        assert settings(tmp_path / "llava", name) == settings(tmp_path / "again", name), name
    # What was converted is what training would have left.
    export(*described, tmp_path / "direct")
    assert same_weights(tmp_path / "hf", tmp_path / "direct")
    mine, theirs = settings(tmp_path / "hf"), settings(tmp_path / "direct")
    assert mine.pop("mm_vision_tower") == tower
    for one in (mine, theirs):
        one["llava_ds_pictures"].pop("pinpoints")  # of none given, the five are written out
        one["text_config"].pop("architectures", None)  # where LLaVA's format has its own
    for name in mine:
        assert mine[name] == theirs[name], name
    assert mine.keys() == theirs.keys()
    for name in (*TOKENIZER, "processor_config.json"):
        mine, theirs = settings(tmp_path / "hf", name), settings(tmp_path / "direct", name)
        for one in (mine, theirs):
            one.pop("unk_token", None)  # transformers' class for Qwen 2 has one unasked
        assert mine == theirs, name
    load_model(tmp_path / "hf")


def test_transformers_format_and_back(trained, tmp_path):
    """A folder as others publish it: <image> and padding among the tokens, spare rows, a chat template of its own."""
    described, tower = trained
    export(*described, tmp_path / "hf")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    tensors = load_file(tmp_path / "hf" / "model.safetensors")
    config = settings(tmp_path / "hf")
    rows = config["text_config"]["vocab_size"] + 5
    for name, tensor in tensors.items():
        if name.endswith(("embed_tokens.weight", "lm_head.weight")):
            tensors[name] = torch.cat([tensor, torch.randn(5, tensor.shape[1])])
    config["text_config"]["vocab_size"] = rows
    for name in ("llava_ds_vocab_size", "llava_ds_version", "llava_ds_pictures", "mm_use_im_start_end"):
        del config[name]
    save_file(tensors, tmp_path / "hf" / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config))
    (tmp_path / "hf" / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    for file in (tmp_path / "hf" / "llava_tokenizer").iterdir():
        file.unlink()
    (tmp_path / "hf" / "llava_tokenizer").rmdir()

    convert(tmp_path / "hf", "--format", "llava", "--output_dir", tmp_path / "llava", "--vision_tower", tower)
    convert(tmp_path / "llava", "--output_dir", tmp_path / "again", "--vision_tower", tower)
    assert same_weights(tmp_path / "hf", tmp_path / "again")
    assert settings(tmp_path / "llava")["vocab_size"] == rows
    again = settings(tmp_path / "again")
    for name in ("image_token_index", "vision_feature_layer", "vision_feature_select_strategy", "architectures"):
        assert again[name] == config[name]
    assert again["text_config"]["vocab_size"] == rows and "llava_ds_version" not in again
    assert (tmp_path / "again" / "chat_template.jinja").read_text() == "{{ messages[0]['content'] }}"
    assert settings(tmp_path / "again", "processor_config.json") == settings(tmp_path / "hf", "processor_config.json")
    reopened = AutoTokenizer.from_pretrained(tmp_path / "again")
    assert reopened.get_vocab() == tokenizer.get_vocab() and reopened.pad_token == tokenizer.pad_token


def test_what_is_no_whole_llava_is_refused(trained, tmp_path):
    described, tower = trained
    with pytest.raises(
        ConfigError, match="is a language model: expected a checkpoint, or the folder of a complete LLaVA"
    ):
        convert(described[2].model_name_or_path, "--output_dir", tmp_path / "no")
    export(*described, tmp_path / "hf")
    with pytest.raises(ConfigError, match="--vision_tower is missing: LLaVA's loader needs the tower's name"):
        convert(tmp_path / "hf", "--format", "llava", "--output_dir", tmp_path / "no")
    with pytest.raises(ConfigError, match="--model_name_or_path needs a checkpoint"):
        convert(tmp_path / "hf", "--model_name_or_path", tower)
    with pytest.raises(ConfigError, match=r"--output_dir .* can't be written to: name another folder"):
        convert(tmp_path / "hf", "--output_dir", tmp_path / "hf" / "config.json" / "no")
    files = sorted(path.name for path in (tmp_path / "hf").iterdir())
    (tmp_path / "link").symlink_to("hf")
    for folder in (tmp_path / "hf", tmp_path / "link"):
        with pytest.raises(ConfigError, match=r"--output_dir .* holds a model that this export reads: name another"):
            convert(tmp_path / "hf", "--output_dir", folder, "--overwrite")
    assert files == sorted(path.name for path in (tmp_path / "hf").iterdir())
