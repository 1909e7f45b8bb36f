"""The page of run/chat.py --web in a real browser: upload, ask, read; and nobody else is asked anything."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import toys
from browser import Browser, missing
from exporting import RANKS, export
from launching import ROOT, environment

from llava_ds.config.arguments import ModelArguments
from llava_ds.constants import ConfigError
from llava_ds.engine.construct import build_model
from llava_ds.extensions.infer.chat import Conversation, read_media
from llava_ds.extensions.infer.generate import Prompt, answer
from llava_ds.extensions.infer.load import load_model
from llava_ds.extensions.infer.web import import_gradio
from llava_ds.geometry import ImageOptions
from llava_ds.model.open.model_plan import plan_model
from llava_ds.runtime.launchers import free_port
from llava_ds.tiny import CLIP_PATH, LLAMA_PATH


def with_gradio() -> dict[str, str]:
    """Variables with which Python finds gradio, which may lie apart (make test-long puts it there). Skips without."""
    site = os.environ.get("DEMO_SITE")
    path = os.pathsep.join(filter(None, (site, os.environ.get("PYTHONPATH"))))
    variables = {**environment(), **({"PYTHONPATH": path} if path else {})}
    look = "import importlib.util, sys; sys.exit(importlib.util.find_spec('gradio') is None)"
    found = subprocess.run([sys.executable, "-c", look], env=variables)
    if found.returncode != 0:
        pytest.skip("gradio is not installed: make test-long installs it, or pip install 'llava_ds[demo]'")
    return variables


@pytest.fixture
def page(tmp_path, tmp_path_factory):
    """(address, loaded model, pictures, the server's process, its log) of a model's page."""
    import torch

    variables = with_gradio()
    if (lacking := missing()) is not None:
        pytest.skip(lacking)
    # The tiny model's own parts speak in words; a toy's control characters would not come through a page unchanged.
    args = ModelArguments(model_name_or_path=str(LLAMA_PATH), vision_tower=str(CLIP_PATH))
    plan = plan_model(args, 512)
    model = build_model(plan, args, {"zero_optimization": {"stage": 0}}, torch.float32, 0, RANKS)
    spec = plan.images
    export(model, plan, args, ImageOptions(spec.size, spec.patch_size, spec.mean), tmp_path / "out")
    pictures = sorted(Path(toys.write_data(tmp_path / "data", "ii")["image_folder"]).glob("*.png"))
    broken = tmp_path / "broken.png"
    broken.write_bytes(b"\x89PNG\r\n\x1a\nno more")
    port = free_port()
    flags = ["--model_path", str(tmp_path / "out"), "--max_new_tokens", "12", "--web", "--port", str(port)]
    with open(tmp_path / "log", "wb") as log:
        server = subprocess.Popen(
            [sys.executable, str(ROOT / "run" / "chat.py"), *flags], env=variables, stdout=log, stderr=log
        )
    yield f"http://127.0.0.1:{port}/", load_model(tmp_path / "out"), [*pictures, broken], server, tmp_path / "log"
    server.kill()
    server.wait()


@pytest.mark.long
def test_upload_ask_and_read(page, tmp_path):
    address, loaded, pictures, server, log = page
    conversation = Conversation()

    def expected(question: str, *shown: Path) -> str:
        nonlocal conversation
        conversation = conversation.with_question(question, [read_media("image", str(path), loaded) for path in shown])
        [text] = answer(loaded, [Prompt(conversation.messages, conversation.media)], max_new_tokens=12)
        conversation = conversation.with_answer(text)
        return text

    with Browser(tmp_path / "profile") as browser:
        browser.until(lambda: server.poll() is not None or b"Ctrl-C" in log.read_bytes(), 600)
        assert server.poll() is None, log.read_text()
        browser.open(address)
        browser.until(lambda: browser.count("textarea"), 120)
        assert browser.ask("document.title") == browser.texts("h1")[0].strip() == "out"  # the model's folder
        assert "llava, template v1, on cpu" in browser.ask("document.body.innerText")

        def ask(question: str, *shown: Path) -> None:
            # The box is closed until an answer has ended.
            open_box = "(box => box && !box.disabled && !box.value)(document.querySelector('textarea'))"
            browser.until(lambda: browser.ask(open_box) and not browser.count(".thumbnail-item"))
            if shown:
                browser.upload("input[type=file]", shown)
                browser.until(lambda: browser.count(".thumbnail-item") == len(shown), 60)
            browser.type("textarea", question)

        def read(text: str) -> None:
            browser.until(lambda: (browser.texts(".bot.message") or [""])[-1].split() == text.split())

        ask("What is it?", pictures[0])
        read(expected("What is it?", pictures[0]))
        ask("And this?", pictures[1])
        read(expected("And this?", pictures[1]))
        ask("Which?", pictures[2])
        browser.until(lambda: any("broken.png can't be read" in text for text in browser.texts(".bot.message")))
        ask("Why?")  # what went wrong is no part of the conversation
        read(expected("Why?"))
        buttons = "[...document.querySelectorAll('button')].filter(b => b.checkVisibility()).map(b => b.ariaLabel)"
        seen = browser.ask(buttons)
        assert "Share" not in seen and {"Retry", "Undo", "Clear", "Copy message"} <= set(seen)
        for width in (400, 800, 1400):
            browser.resize(width)
            assert browser.ask("document.documentElement.scrollWidth") <= width
            # The conversation scrolls in a box of its own.
            assert [text for text in browser.cut_texts() if not text.startswith("clipped")] == []
        browser.screenshot(tmp_path / "page.png")
        asked = [url for url in browser.requests if not url.startswith((address, "data:", "blob:"))]
        assert asked == [] and browser.errors == []


def test_a_missing_gradio_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "gradio", None)
    with pytest.raises(ConfigError, match=r"pip install 'llava_ds\[demo\]'"):
        import_gradio()
