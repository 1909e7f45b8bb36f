"""make serve-check, on an export of the tiny model's own parts: all paths agree, and one that does not is named."""

import runpy
import sys

import pytest
import torch
from exporting import RANKS, export
from launching import ROOT

from llava_ds.config.arguments import ModelArguments
from llava_ds.constants import ConfigError
from llava_ds.engine.construct import build_model
from llava_ds.geometry import ImageOptions
from llava_ds.model.plan import plan_model
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


@pytest.mark.full
def test_every_path_gives_the_answers(folder, tmp_path, monkeypatch, capsys):
    check(monkeypatch, folder, "--output", str(tmp_path))
    assert capsys.readouterr().out.count("3 of 3 equal") == 7
    assert (tmp_path / "serve-check.json").is_file()


@pytest.mark.full
def test_a_path_with_another_prompt_is_named(folder, monkeypatch):
    template = folder / "chat_template.jinja"
    template.write_text(template.read_text().replace("ASSISTANT:", "ASSISTANT: I"))
    with pytest.raises(ConfigError, match="the answers of template, then processor are not"):
        check(monkeypatch, folder, "--only", "template, then processor")
