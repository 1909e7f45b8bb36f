"""run/chat.py --serve: the official client gets the model's answers, and every other request one clear refusal."""

import base64
import contextlib
import http.client
import io
import itertools
import json
import queue
import random
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import openai
import psutil
import pytest
import toys
from endpoint import KEY, MODEL, client_of, echo, endpoint, until
from exporting import export_toy
from launching import ROOT, environment
from malformed import malformed
from PIL import Image

from llava_ds.constants import ConfigError, DataError
from llava_ds.extensions.infer import answer_queue, chat
from llava_ds.extensions.infer.answer_queue import AnswerQueue, Job, Question, StoppedText
from llava_ds.extensions.infer.api import KEY_VARIABLE, Limits, api_key, check_server_packages
from llava_ds.extensions.infer.chat import Conversation, ask, read_media
from llava_ds.extensions.infer.chat_completions import ONLY
from llava_ds.extensions.infer.generate import Reply, Sampling
from llava_ds.extensions.infer.load import load_model
from llava_ds.extensions.infer.local_server import listening
from llava_ds.runtime.launchers import free_port

LIMITS = Limits(num_requests=40, body_bytes=200_000, body_s=1.0)


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """(address, uploads) of an endpoint over echo."""
    folder = tmp_path_factory.mktemp("uploads")
    with endpoint(echo, folder, Sampling(max_new_tokens=50), LIMITS) as (address, _):
        yield address, folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """The exported folder of a random toy."""
    return export_toy(tmp_path_factory.mktemp("api"))


@pytest.fixture(scope="module")
def pictures(tmp_path_factory) -> list[Path]:
    folder = Path(toys.write_data(tmp_path_factory.mktemp("pictures"), "iii")["image_folder"])
    return sorted(folder.glob("[0-9].png"))


def data_url(content: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def user(text: str, *images: bytes) -> dict:
    shown = [{"type": "image_url", "image_url": {"url": data_url(image)}} for image in images]
    return {"role": "user", "content": [*shown, {"type": "text", "text": text}] if images else text}


def said(address: str, *messages: dict, **more: object) -> str:
    """The answer, which is the same streamed."""
    create = partial(client_of(address).chat.completions.create, model=MODEL, messages=list(messages), **more)
    plain = create().choices[0]
    chunks = [chunk.choices[0] for chunk in create(stream=True)]
    assert "".join(chunk.delta.content or "" for chunk in chunks) == plain.message.content
    assert [chunk.finish_reason for chunk in chunks if chunk.finish_reason] == [plain.finish_reason]
    return plain.message.content


def post(address: str, body: object, path: str = "/v1/chat/completions", key: str = KEY, method: str = "POST"):
    """(status, headers, content) of a plain request."""
    connection = http.client.HTTPConnection(address.split("/")[2], timeout=60)
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    connection.request(method, path, content, {"Authorization": f"Bearer {key}"})
    response = connection.getresponse()
    with contextlib.closing(connection):
        return response.status, response.headers, response.read()


def refused(address: str, body: object, **more: object) -> tuple[int, dict]:
    """Status and OpenAI's error object."""
    status, _, content = post(address, body, **more)
    error = json.loads(content)["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["message"]
    return status, error


def request(**more: object) -> dict:
    return {"model": MODEL, "messages": [{"role": "user", "content": "What is it?"}], **more}


def test_what_is_given_is_what_is_asked(served):
    address, _ = served
    text = said(
        address, user("Hello"), temperature=0.5, top_p=0.25, seed=7, extra_body={"top_k": 3, "repetition_penalty": 1.5}
    )
    assert text == "Hello t=0.5 p=0.25 k=3 s=7 r=1.5"
    assert said(address, user("a b c d"), max_tokens=2) == said(address, user("a b"), max_completion_tokens=2) == "a b"
    assert said(address, user("one two three"), stop=["o th", "p="]) == "one tw"
    parts = [{"type": "text", "text": "a "}, {"type": "text", "text": "b", "unknown": None}]
    neutral = {name: values[0] for name, values in ONLY.items()}
    assert said(address, {"role": "user", "content": parts}, max_tokens=9, extra_body=neutral) == said(
        address, user("a b")
    )
    create = client_of(address).chat.completions.create
    kinds = [(create(**request(max_tokens=n)).choices[0].finish_reason, n) for n in (1, 50)]
    assert kinds == [("length", 1), ("stop", 50)]
    usage = create(**request()).usage
    *_, last = create(**request(), stream=True, stream_options={"include_usage": True})
    assert last.usage == usage and last.choices == [] and usage.total_tokens == usage.prompt_tokens + 8
    assert [model.id for model in client_of(address).models.list()] == [client_of(address).models.retrieve(MODEL).id]


@pytest.mark.parametrize(
    ("change", "param", "message"),
    [
        ({name: "other"}, name, f"{name} can only be") for name in ONLY
    ] + [
        ({"n": 2}, "n", "n can only be 1 here"),
        ({"logprobs": 0}, "logprobs", "logprobs can only be false"),
        ({"user": "me"}, "user", "user: it is not known here: leave it out"),
        ({"temprature": 1}, "temprature", "did you mean temperature"),
        ({"temperature": 1e-9}, "temperature", "give 0 for the likeliest"),
        ({"temperature": 2.5}, "temperature", "less than or equal to 2"),
        ({"temperature": "1"}, "temperature", "valid number"),
        ({"top_p": 0}, "top_p", "greater than 0"),
        ({"seed": -1}, "seed", "greater than or equal to 0"),
        ({"max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens", "differ: give one of them"),
        ({"stop": [""]}, "stop[0]", "at least 1 character"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "goes with stream"),
        ({"model": "gpt"}, "model", f"model 'gpt' not found, only '{MODEL}'"),
        ({"messages": []}, "messages", "at least 1"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role", "'system', 'user' or 'assistant'"),
        ({"messages": [user("x"), {"role": "assistant", "content": "y"}]}, "messages", "end with a question"),
        ({"messages": [{"role": "assistant", "content": "y"}, user("x")]}, "messages[0]", "before any question"),
        ({"messages": [user("x"), {"role": "system", "content": "y"}]}, "messages[1]", "only the first"),
        ({"messages": [user(" ")]}, "messages[0]", "no text and no image"),
        ({"messages": [user("a <image>")]}, "messages[0]", "a placeholder for an image"),
    ],
)  # fmt: skip
def test_a_refusal_names_the_field(served, change, param, message):
    status, error = refused(served[0], request(**change))
    assert (status, error["param"]) == (404 if param == "model" else 400, param) and message in error["message"]


@pytest.mark.parametrize("url", [
    "https://example.com/a.png", "file:///etc/passwd", "/etc/passwd", "data:text/plain;base64,eA==",
    "data:image/png,x", "data:image/png;base64", "",
])  # fmt: skip
def test_nothing_but_data_urls_is_read(served, url):
    content = [{"type": "image_url", "image_url": {"url": url}}]
    status, error = refused(served[0], request(messages=[{"role": "user", "content": content}]))
    assert status == 400 and error["param"] == "messages[0].content[0].image_url" and "data URL" in error["message"]


def test_who_has_no_key_gets_no_answer(served):
    address, _ = served
    for key in ("", "other", KEY + "x", "\xe9"):
        assert refused(address, request(), key=key)[0] == 401
        assert refused(address, b"", path="/v1/models", key=key, method="GET")[0] == 401
    with pytest.raises(openai.AuthenticationError, match="Authorization: Bearer"):
        openai.OpenAI(base_url=address, api_key="other", max_retries=0).chat.completions.create(**request())
    assert post(address, b"", path="/health", key="", method="GET")[0] == 200
    assert refused(address, b"", path="/nothing")[0] == 404
    assert refused(address, b"", method="GET")[0] == 405
    assert refused(address, b"", path="/v1/models/other", method="GET")[0] == 404


def test_a_body_is_bounded(served):
    address, _ = served
    assert refused(address, request(user="x" * LIMITS.body_bytes))[0] == 413
    host = address.split("/")[2]
    for head, expected in (("Content-Length: 10", 408), ("Content-Length: 9999999", 413)):
        connection = http.client.HTTPConnection(host, timeout=60)
        connection.connect()
        with contextlib.closing(connection):
            connection.sock.sendall(
                f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\n"
                f"Authorization: Bearer {KEY}\r\n{head}\r\n\r\n{{".encode()
            )
            assert connection.sock.recv(99).startswith(f"HTTP/1.1 {expected} ".encode())


def test_malformed_requests_are_refused(served, capfd):
    address, uploads = served
    statuses = [post(address, body, key=key)[0] for body, key in malformed(150, seed=1)]
    assert set(statuses) <= {400, 401, 404, 413} and statuses.count(400) > 90
    assert said(address, user("still there"), max_tokens=2) == "still there"
    assert list(uploads.iterdir()) == [] and "Traceback" not in capfd.readouterr().err


class Slow:
    """An answer of many words, which goes on when a test lets it."""

    def __init__(self) -> None:
        self.go, self.begun, self.ended, self.open = threading.Event(), 0, 0, 0

    def __call__(self, conversation, sampling, on_text, stopped) -> Reply:
        self.begun += 1
        self.open += 1
        assert self.open == 1, "one at a time"
        words = 0
        while not stopped() and not (words and self.go.is_set()):
            on_text("word ")
            words += 1
            time.sleep(0.002)
        self.open -= 1
        self.ended += 1
        return Reply("word " * words, "stopped" if stopped() else "marker", 1, words, 0.1, 7.2)


def test_a_client_that_leaves_ends_its_answer(tmp_path):
    slow = Slow()
    with endpoint(slow, tmp_path, Sampling(), LIMITS) as (address, _):
        stream = client_of(address).chat.completions.create(**request(), stream=True)
        next(iter(stream))
        stream.close()
        until(lambda: slow.ended == 1)
        with pytest.raises(openai.APITimeoutError):
            client_of(address).with_options(timeout=0.3).chat.completions.create(**request())
        until(lambda: slow.ended == 2)
        stream = client_of(address).chat.completions.create(**request(), stream=True)
        next(iter(stream))
        for streams in (False, True):  # leaves while it waits: never begun
            with pytest.raises(openai.APITimeoutError):
                client_of(address).with_options(timeout=0.3).chat.completions.create(**request(), stream=streams)
        slow.go.set()
        list(stream)
        assert said(address, user("x")).startswith("word") and slow.begun == 3 + 2
    assert list(tmp_path.iterdir()) == []


def test_more_than_the_queue_takes_is_refused(tmp_path):
    slow = Slow()
    with endpoint(slow, tmp_path, Sampling(), Limits(3)) as (address, answers), ThreadPoolExecutor(3) as pool:
        asked = [pool.submit(client_of(address).chat.completions.create, **request()) for _ in range(3)]
        until(lambda: len(list(tmp_path.iterdir())) == 3)
        answers.seconds_per_answer = 6.5
        status, headers, content = post(address, request())
        assert (status, headers["Retry-After"]) == (429, "7") and b"3 requests are open" in content
        slow.go.set()
        assert all(future.result().choices[0].message.content for future in asked)
        assert post(address, request())[0] == 200


def test_at_the_end_everyone_is_told(tmp_path):
    slow = Slow()
    with ThreadPoolExecutor(3) as pool, endpoint(slow, tmp_path, Sampling(), LIMITS) as (address, answers):
        create = client_of(address).chat.completions.create
        stream = iter(create(**request(), stream=True))
        next(stream)
        waiting = [pool.submit(create, **request(stream=streams)) for streams in (False, True)]
        until(lambda: len(list(tmp_path.iterdir())) == 3)
        answers.closing = True
        for future in waiting:
            with pytest.raises(openai.InternalServerError, match="the server is stopping") as caught:
                future.result()
            assert caught.value.status_code == 503
        with pytest.raises(openai.APIError, match="the server is stopping"):
            list(stream)
    assert slow.begun == 1 and not answers._thread.is_alive()


def test_a_failure_is_told_and_the_next_is_answered(tmp_path, capfd):
    def fail(conversation, *more) -> Reply:
        text = conversation.messages[-1].text
        if text == "break":
            raise RuntimeError("secret")
        if text == "refuse":
            raise DataError("the conversation is too long")
        return echo(conversation, *more)

    with endpoint(fail, tmp_path, Sampling(), LIMITS) as (address, _):
        status, error = refused(address, request(messages=[user("break")]))
        assert (status, error["type"]) == (500, "server_error") and "secret" not in error["message"]
        assert "RuntimeError: secret" in capfd.readouterr().err
        for streams in (False, True):
            assert refused(address, request(messages=[user("refuse")], stream=streams))[0] == 400
        assert said(address, user("go on"), max_tokens=2) == "go on"


def test_ranks_out_of_step_end_the_server():
    def fail(*_) -> Reply:
        raise RuntimeError("out of step")

    called, delivered = threading.Event(), []
    answers = AnswerQueue(fail, ends_on_failure=True, on_failure=called.set)
    job = Job(Question(Conversation(), Sampling()), delivered.append, lambda: None)
    answers.submit(job)
    answers.submit(job)
    assert called.wait(30)
    answers.close()
    assert [type(item).__name__ for item in delivered] == ["RuntimeError", "Closing"] and answers.failure is delivered[
        0
    ]


def test_other_ranks_do_not_give_up_on_an_idle_server(monkeypatch):
    monkeypatch.setattr(answer_queue, "IDLE_S", 0.01)
    words, asked = queue.SimpleQueue(), []
    monkeypatch.setattr(chat, "_share", lambda ranks, request: words.get() if request is None else words.put(request))
    monkeypatch.setattr(chat, "stream", lambda loaded, *request: asked.append(request))
    other = threading.Thread(target=chat.answer_for_rank_0, args=[SimpleNamespace(ranks=None)])
    other.start()
    idle = threading.Semaphore(0)

    def on_idle() -> None:
        chat.keep_waiting(SimpleNamespace(ranks=None))
        idle.release()

    answers = AnswerQueue(echo, on_idle=on_idle)
    assert idle.acquire(timeout=30) and idle.acquire(timeout=30)
    answers.close()
    words.put(("prompt", "sampling"))
    words.put(None)
    other.join(30)
    assert not other.is_alive() and asked == [("prompt", "sampling")]


def test_text_ends_before_a_stop_sequence():
    rng = random.Random(0)
    for _ in range(2000):
        text = "".join(rng.choices("ab ", k=rng.randrange(30)))
        stops = ["".join(rng.choices("ab ", k=rng.randint(1, 4))) for _ in range(rng.randrange(4))]
        shown: list[str] = []
        stopped, left = StoppedText(stops, shown.append), text
        while left and not stopped.found:
            n = rng.randint(1, 5)
            stopped.add(left[:n])
            left = left[n:]
            assert not any(stop in "".join(shown) for stop in stops)
        stopped.end()
        answer = "".join(shown)
        assert stopped.found == any(stop in text for stop in stops) and all(shown)
        assert text.startswith(tuple(answer + stop for stop in stops)) if stopped.found else answer == text


def test_keys(monkeypatch):
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    first, second = api_key(), api_key()
    assert first[1] and first[0] != second[0] and len(first[0]) >= 32
    monkeypatch.setenv(KEY_VARIABLE, "my-own-key")
    assert api_key() == ("my-own-key", False)
    for bad in ("", "short", "with space in it", "ünlesbar-x"):
        monkeypatch.setenv(KEY_VARIABLE, bad)
        with pytest.raises(ConfigError, match="8 to 200 characters"):
            api_key()


def test_what_is_missing_is_told(monkeypatch):
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    with pytest.raises(ConfigError, match=r"--serve needs fastapi and uvicorn .*pip install 'llava_ds\[serve\]'"):
        check_server_packages()
    with listening(0) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"--port {port} can't be used .*: give another one"), listening(port):
            pass


def test_the_client_gets_what_chat_says(folder, pictures, tmp_path):
    loaded = load_model(folder)
    sampling = Sampling(max_new_tokens=6)
    images = [path.read_bytes() for path in pictures]
    with endpoint(partial(ask, loaded), tmp_path, sampling, LIMITS) as (address, _):
        conversation, messages = Conversation(), []
        for text, shown in (("What is it?", [0, 1]), ("And this?", [2]), ("Why?", [])):
            media = [read_media("image", str(pictures[i]), loaded) for i in shown]
            conversation = conversation.with_question(text, media)
            messages.append(user(text, *(images[i] for i in shown)))
            expected = ask(loaded, conversation, sampling)
            assert said(address, *messages) == expected.text
            conversation = conversation.with_answer(expected.text)
            messages.append({"role": "assistant", "content": expected.text})
        drawn = ask(loaded, Conversation().with_question("Why?"), Sampling(6, temperature=1.5, seed=3)).text
        assert said(address, user("Why?"), temperature=1.5, seed=3) == drawn != said(address, user("Why?"))

        large = io.BytesIO()
        Image.new("1", (30_000, 20_000)).save(large, "PNG")
        for content, problem in (
            (images[0][:-30], "can't be read"), (b"x", "its format"), (b"", "its format"), (large.getvalue(), "pixels"),
        ):  # fmt: skip
            status, error = refused(address, request(messages=[user("What?", images[0], content)], stream=True))
            assert (
                status == 400 and error["param"] == "messages[0].content[1].image_url" and problem in error["message"]
            )
            assert str(tmp_path) not in error["message"]
        status, error = refused(address, request(messages=[user("word " * 600)]))
        assert status == 400 and "512" in error["message"]
    assert list(tmp_path.iterdir()) == []


@contextlib.contextmanager
def script(folder: Path, log: Path, command: list[str], *flags: str):
    """(process, client) of run/chat.py --serve, for the folder of a model."""
    port = free_port()
    flags = ("--model_path", str(folder), "--max_new_tokens", "8", "--serve", "--port", str(port), *flags)
    variables = {**environment(), KEY_VARIABLE: KEY}
    with open(log, "wb") as file:
        server = subprocess.Popen(
            [*command, str(ROOT / "run" / "chat.py"), *flags], env=variables, stdout=file, stderr=file
        )
    try:
        until(lambda: server.poll() is not None or b"Ctrl-C" in log.read_bytes(), 300)
        assert server.poll() is None, log.read_text()
        yield server, openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=KEY, max_retries=0, timeout=300)
    finally:
        server.kill()
        server.wait()


@pytest.mark.long
def test_ranks_that_share_a_model_answer_together(folder, tmp_path):
    asked = [user("What is it?"), user("Why?")]
    loaded = load_model(folder)
    expected = [ask(loaded, Conversation().with_question(one["content"]), Sampling(8)).text for one in asked]
    command = [str(Path(sys.executable).with_name("deepspeed")), "--num_accelerators", "2", "--log_level", "error"]
    with script(folder, tmp_path / "log", command, "--engine", "deepspeed") as (server, client):
        create = partial(client.chat.completions.create, model=folder.name)
        for message, text in zip(asked, expected):
            assert create(messages=[message]).choices[0].message.content == text
            stopped = create(messages=[message], stop=text[1:3]).choices[0]
            assert stopped.message.content == text[: text.index(text[1:3])] and stopped.finish_reason == "stop"
            stream = create(messages=[message], stream=True)
            next(iter(stream))
            stream.close()  # both ranks end the answer, and take the next question
        assert "sharded over 2 ranks" in (tmp_path / "log").read_text()
        children = psutil.Process(server.pid).children(recursive=True)
        server.send_signal(signal.SIGTERM)
        server.wait(60)
        assert psutil.wait_procs(children, 60)[1] == []


def memory_of(process: subprocess.Popen) -> int:
    """Resident bytes, without what is shared with files."""
    return psutil.Process(process.pid).memory_info().rss


@pytest.mark.long
def test_the_script_under_load(folder, pictures, tmp_path):
    """2,000 requests of 32 clients at once, 500 malformed ones, and SIGTERM."""
    loaded, asked = load_model(folder), []
    for i, path in itertools.product(range(4), pictures):
        question = f"What is it, for the {i}. time?"
        conversation = Conversation().with_question(question, [read_media("image", str(path), loaded)])
        asked.append((user(question, path.read_bytes()), ask(loaded, conversation, Sampling(8)).text))
    with script(folder, tmp_path / "log", [sys.executable]) as (server, client), ThreadPoolExecutor(32) as pool:

        def once(n: int) -> bool:
            message, expected = asked[n % len(asked)]
            create = partial(client.chat.completions.create, model=folder.name, messages=[message])
            if n % 2:
                return create().choices[0].message.content == expected
            return "".join(chunk.choices[0].delta.content or "" for chunk in create(stream=True)) == expected

        sizes = []
        for _ in range(4):
            assert all(pool.map(once, range(500)))
            sizes.append(memory_of(server))
        named = [(body.replace(f'"{MODEL}"'.encode(), b'"out"'), key) for body, key in malformed(500, seed=2)]
        statuses = [post(str(client.base_url), body, key=key)[0] for body, key in named]
        sizes.append(memory_of(server))
        assert max(statuses) < 500 and statuses.count(400) > 300 and once(0)
        print("MB after each 500 requests, then 500 malformed ones:", [round(size / 1e6, 1) for size in sizes])
        assert max(sizes[1:]) < sizes[0] + 8e6, sizes
        server.send_signal(signal.SIGTERM)
        assert server.wait(60) == 0
        text = (tmp_path / "log").read_text()
        assert re.search(r"127\.0\.0\.1:\d+/v1 serves \w+, key LLAVA_DS_API_KEY  \(Ctrl-C ends\)", text)
        assert "Traceback" not in text and KEY not in text and "tokens/s" in text
