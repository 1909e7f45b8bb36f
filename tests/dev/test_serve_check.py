"""make serve-check, on an export of the tiny model's own parts: all paths agree, and one that does not is named.

vLLM and llama.cpp are asked by make serve-check-vllm and serve-check-gguf alone.
"""

import runpy
import shlex
import subprocess
import sys

import pytest
import torch
from exporting import RANKS, export
from launching import ROOT
from transformers import CLIPVisionConfig
from transformers.models.clip.modeling_clip import CLIPVisionEmbeddings

from llava_ds.config.arguments import ModelArguments
from llava_ds.constants import ConfigError
from llava_ds.engine.construct import build_model
from llava_ds.geometry import ImageOptions
from llava_ds.model.open.model_plan import plan_model
from llava_ds.tiny import CLIP_PATH, LLAMA_PATH


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    args = ModelArguments(model_name_or_path=str(LLAMA_PATH), vision_tower=str(CLIP_PATH))
    plan = plan_model(args, 512)
    model = build_model(plan, args, {"zero_optimization": {"stage": 0}}, torch.float32, 0, RANKS)
    spec = plan.images
    export(model, plan, args, ImageOptions(spec.size, spec.patch_size, spec.mean), folder)
    return folder


def check(monkeypatch, folder, *flags: str) -> None:
    flags = ("--model_path", str(folder), "--questions", "3", "--max_new_tokens", "6", *flags)
    monkeypatch.setattr(sys, "argv", ["serve_check.py", *flags])
    runpy.run_path(str(ROOT / "run" / "dev" / "serve_check.py"))["main"]()


@pytest.mark.long
def test_every_path_gives_the_answers(folder, tmp_path, monkeypatch, capsys):
    check(monkeypatch, folder, "--output", str(tmp_path))
    assert capsys.readouterr().out.count("3 of 3 equal") == 7
    assert (tmp_path / "serve-check.json").is_file()


@pytest.mark.long
def test_a_path_with_another_prompt_is_named(folder, monkeypatch):
    template = folder / "chat_template.jinja"
    template.write_text(template.read_text().replace("ASSISTANT:", "ASSISTANT: I"))
    with pytest.raises(ConfigError, match="the answers of template, then processor differ from"):
        check(monkeypatch, folder, "--only", "template, then processor")


def test_the_class_token_where_llama_cpp_puts_it():
    config = CLIPVisionConfig(hidden_size=8, image_size=4, patch_size=2, num_attention_heads=2)
    embeddings = CLIPVisionEmbeddings(config)
    torch.nn.init.normal_(embeddings.position_embedding.weight)
    hook = runpy.run_path(str(ROOT / "run" / "dev" / "serve_check.py"))["misplace_class_token"]
    images = torch.randn(2, 3, 4, 4)
    patches = embeddings.patch_embedding(images).flatten(2).transpose(1, 2)
    expected = (
        torch.cat([patches, embeddings.class_embedding.expand(2, 1, -1)], 1) + embeddings.position_embedding.weight
    )
    assert not torch.allclose(embeddings(images), expected, atol=1e-3)
    embeddings.register_forward_hook(hook)
    assert torch.allclose(embeddings(images), expected, atol=1e-5)


@pytest.mark.parametrize("target", ["serve-check", "serve-check-vllm", "serve-check-gguf"])
def test_the_targets_flags_exist(target, monkeypatch):
    done = subprocess.run(["make", "-n", target, "ARGS=--questions 7"], cwd=ROOT, capture_output=True, text=True)
    [line] = [line for line in done.stdout.replace("\\\n", " ").splitlines() if "serve_check.py" in line]
    monkeypatch.setattr(sys, "argv", ["serve_check.py", *shlex.split(line.split("serve_check.py")[1])])
    args = runpy.run_path(str(ROOT / "run" / "dev" / "serve_check.py"))["parse"]()
    asked = {"serve-check-vllm": args.vllm_python, "serve-check-gguf": args.llama_cpp_python}
    assert args.questions == 7
    assert [name for name, python in asked.items() if python] == [name for name in asked if name == target]
