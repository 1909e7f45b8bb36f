"""Conversations: what is asked is what training would have seen, what is wrong is told, and the talk goes on."""

import importlib.util
import io
import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
import toys
from exporting import export_toy
from launching import ROOT
from PIL import Image
from read_data import read_samples

from llava_ds.constants import ConfigError, DataError
from llava_ds.data.sample import FileRef, Media, Message
from llava_ds.extensions.infer.chat import Conversation, Session, ask, read_media, run_conversation
from llava_ds.extensions.infer.generate import Prompt, Sampling, TextPieces, answer, prompt_ids, stream
from llava_ds.extensions.infer.load import load_model
from llava_ds.extensions.infer.web import conversation_of


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """The exported folder of a random toy."""
    return export_toy(tmp_path_factory.mktemp("chat"))


@pytest.fixture(scope="module")
def loaded(folder):
    return load_model(folder)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory) -> list[str]:
    folder = Path(toys.write_data(tmp_path_factory.mktemp("pictures"), "iii")["image_folder"])
    (folder / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\nno more")
    return [*map(str, sorted(folder.glob("[0-9].png"))), str(folder / "broken.png")]


def talk(session: Session, *lines: str) -> None:
    run_conversation(session, iter([*lines, None]).__next__)


def test_what_is_streamed_is_the_answer(loaded, pictures):
    conversation = Conversation().with_question("What is it?", [read_media("image", pictures[0], loaded)])
    pieces: list[str] = []
    reply = ask(loaded, conversation, Sampling(max_new_tokens=12), pieces.append)
    prompt = Prompt(conversation.messages, conversation.media)
    assert len(pieces) > 1 and "".join(pieces) == reply.text == answer(loaded, [prompt], max_new_tokens=12)[0]
    assert reply.num_prompt_tokens == len(prompt_ids(loaded, prompt))
    assert 1 <= reply.num_tokens <= 12 and 0 < reply.first_s <= reply.seconds


def test_half_a_character_is_not_shown(loaded):
    class Bytes:
        def decode(self, ids, **_):
            return bytes(ids).decode(errors="replace")

    shown: list[str] = []
    pieces = TextPieces(Bytes(), shown.append, 0.0)
    pieces.put(torch.empty(1, 0, dtype=torch.long))  # the prompt
    for byte in " é\n x ".encode():
        pieces.put(torch.tensor([byte]))
    pieces.end()
    assert "".join(shown) == pieces.shown == "é\n x" and shown[0] == "é"


def test_pictures_are_shown_with_the_question_that_they_came_with(loaded, pictures, capsys):
    session = Session(loaded, Sampling(max_new_tokens=3), quiet=True)
    session.pending = [read_media("image", path, loaded) for path in pictures[:2]]
    talk(session, "What is it?", f"/image {pictures[2]}", "And this?", "Why?")
    texts = [message.text for message in session.conversation.messages if message.role == "human"]
    assert texts == ["<image>\n<image>\nWhat is it?", "<image>\nAnd this?", "Why?"]
    assert [media.refs[0].path for media in session.conversation.media] == pictures[:3]
    asked = session.conversation.messages
    replies = [message.text for message in asked if message.role == "gpt"]
    again = answer(loaded, [Prompt(asked[:3], session.conversation.media)], max_new_tokens=3)[0]
    assert replies[1] == again
    assert capsys.readouterr().out == "".join(f"{reply}\n" for reply in replies)


def test_what_is_wrong_is_told_and_the_conversation_goes_on(loaded, pictures, capsys):
    session = Session(loaded, Sampling(max_new_tokens=2))
    talk(
        session,
        "/image nowhere.png",
        f"/image {pictures[3]}",
        "/imagine",
        "/save",
        '/image "half',
        "a <image> of my own",
        "word " * 600,
        "What is it?",
    )
    out, err = capsys.readouterr()
    said = [line for line in err.splitlines() if line.startswith("error: ")]
    for line, part in zip(
        said,
        (
            "nowhere.png",
            "broken.png",
            "/imagine is not a command: /image",
            "/save needs",
            "No closing",
            "a placeholder for an image",
            "512",
        ),
        strict=True,
    ):
        assert part in line
    assert len(session.conversation.messages) == 2 and session.pending == []
    assert out.strip() == session.conversation.messages[1].text and "tokens/s" in err


def test_commands(loaded, pictures, tmp_path, capsys):
    session = Session(loaded, Sampling(max_new_tokens=3), quiet=True)
    saved = tmp_path / "talk.json"
    talk(session, f"/image {pictures[0]} '{pictures[1]}'", "What is it?", "Why?", f"/save {saved}", f"/save {saved}")
    [sample] = read_samples(str(saved), str(Path(pictures[0]).parent))
    assert sample.messages == session.conversation.messages and len(sample.media) == 2
    assert "File exists" in capsys.readouterr().err
    talk(session, "/history", "/reset", "/history", "/help")
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(f"[image {pictures[0]}]\n[image {pictures[1]}]\n> What is it?\n< ")
    assert session.conversation == Conversation() and err.count("What is it?") == 1 and "/reset" in err
    talk(session, "/exit", "What?")
    assert session.conversation == Conversation()


def test_sampling(loaded, pictures):
    prompt = Prompt((Message("human", "What is it?"),), ())

    def said(**options: object) -> str:
        return stream(loaded, prompt, Sampling(max_new_tokens=8, **options)).text

    assert said(temperature=1.5, seed=3) == said(temperature=1.5, seed=3)
    assert len({said(temperature=1.5, seed=seed) for seed in range(6)}) > 1
    greedy = said()
    assert said(temperature=1.5, top_k=1, seed=0) == said(temperature=1.5, top_p=1e-6, seed=1) == greedy
    assert said(repetition_penalty=50.0) != greedy
    stopped = stream(loaded, prompt, Sampling(max_new_tokens=8), stopped=lambda: True)
    assert (stopped.num_tokens, stopped.ended) == (1, "stopped")


def test_an_answer_ends_where_positions_end(loaded):
    asked = [Prompt((Message("human", "a " * words),), ()) for words in range(100, 500)]
    lengths = [len(prompt_ids(loaded, prompt)) for prompt in asked]
    prompt, length = next((p, n) for p, n in zip(asked, lengths) if 500 <= n < 512)
    reply = stream(loaded, prompt, Sampling(max_new_tokens=100))
    assert reply.num_tokens <= 512 - length


def test_the_script(folder, pictures, monkeypatch, capsys):
    spec = importlib.util.spec_from_file_location("run_chat", ROOT / "run" / "chat.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)

    def run(*arguments: str, typed: str = "") -> str:
        monkeypatch.setattr(sys, "argv", ["run/chat.py", "--model-path", str(folder), *arguments])
        monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
        script.main(sys.argv[1:])
        return capsys.readouterr().out

    loaded = load_model(folder)
    conversation = Conversation().with_question(
        "What is it?", [Media("image", (FileRef(path),)) for path in pictures[:2]]
    )
    expected = ask(loaded, conversation, Sampling(max_new_tokens=4)).text
    flags = ["--image", *pictures[:2], "--max_new_tokens", "4"]
    assert run(*flags, "--question", "What is it?") == f"{expected}\n"
    assert run(*flags, typed="\nWhat is it?\n/reset\n") == f"{expected}\n"
    for wrong, message in (
        (["--image", "nowhere.png", "--question", "What?"], "nowhere.png"),
        (["--image", pictures[3], "--question", "What?"], "broken.png"),
    ):
        with pytest.raises(DataError, match=message):
            run(*wrong)
    for wrong, message in (
        (["--top_p", "0"], "--top_p is 0: give a value above 0"),
        (["--temperature", "inf", "--seed", str(2**63)], r"--temperature is inf: .*\n--seed is 9223372036854775808"),
        (["--web", "--image", "x.png"], "--image, --question: with --web it is given on the page"),
        (["--serve"], "--question: with --serve, requests set it"),
        (["--serve", "--web"], "--web and --serve: give one, and"),
        (["--offload", "cpu"], "--offload cpu is DeepSpeed's"),
        (["--engine", "deepspeed", "--offload", "nvme"], "needs --offload_path"),
        (["--version", "v7"], "--version v7 is not known"),
    ):
        with pytest.raises(ConfigError, match=message):
            run(*wrong, "--question", "What?")


def test_another_template_changes_the_prompt(folder):
    messages = (Message("human", "What is it?"),)
    ids = [
        prompt_ids(load_model(folder, version=version), Prompt(messages, ()))
        for version in (None, "vicuna_v1", "llava_v0")
    ]
    assert ids[0] == ids[1] != ids[2]


def test_a_folder_that_says_no_template_is_told_of(folder, tmp_path):
    for file in folder.iterdir():
        if file.is_file() and file.name != "config.json":
            shutil.copy(file, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    del config["llava_ds_version"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert "--version names another" in load_model(tmp_path).notes[0]
    assert load_model(tmp_path, version="v1").notes == () == load_model(folder).notes


def test_turns_of_the_page(pictures):
    def part(path: str) -> dict:
        return {"type": "file", "file": {"path": path}}

    def turn(role: str, *content: object, **more: object) -> dict:
        return {"role": role, "content": list(content), **more}

    text = {"type": "text", "text": "What?"}
    history = [
        turn("user", part(pictures[0])),
        turn("user", text),
        turn("assistant", {"type": "text", "text": "a cat"}),
        turn("user", part(pictures[3]), text),
        turn("assistant", {"type": "text", "text": "it is broken"}, metadata={"title": "error"}),
        turn("user", text),  # was stopped before its answer began
    ]
    conversation = conversation_of(history)
    assert conversation.messages == (Message("human", "<image>\nWhat?"), Message("gpt", "a cat"))
    assert conversation.media == (Media("image", (FileRef(pictures[0]),)),)


def test_a_picture_is_decoded_when_it_is_given(loaded, tmp_path):
    Image.new("RGB", (30, 30)).save(tmp_path / "cut.png")
    content = (tmp_path / "cut.png").read_bytes()
    (tmp_path / "cut.png").write_bytes(content[: len(content) - 30])
    with pytest.raises(DataError, match=r"cut\.png can't be read"):
        read_media("image", str(tmp_path / "cut.png"), loaded)
