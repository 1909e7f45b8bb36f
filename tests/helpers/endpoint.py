"""The endpoint of run/chat.py --serve in this process, over any function that answers."""

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import openai

from llava_ds.data.special_tokens import shown_text
from llava_ds.extensions.infer.answer_queue import AnswerQueue, Generate
from llava_ds.extensions.infer.api import Limits, Service, build_app
from llava_ds.extensions.infer.generate import Reply, Sampling
from llava_ds.extensions.infer.local_server import ADDRESS, listening, make_server

KEY, MODEL = "a-key-for-tests", "toy"


@contextlib.contextmanager
def endpoint(generate: Generate, folder: Path, sampling: Sampling, limits: Limits) -> Iterator[tuple[str, AnswerQueue]]:
    """Serve in a thread; gives the address with /v1, and the queue."""
    answers = AnswerQueue(generate)
    with listening(0) as listener:
        server = make_server(build_app(Service(answers, MODEL, sampling, KEY, limits, folder)), "")
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        until(lambda: server.started or not thread.is_alive())
        try:
            yield f"http://{ADDRESS}:{listener.getsockname()[1]}/v1", answers
        finally:
            server.handle_exit(0, None)
            answers.close()
            thread.join()


def until(condition, seconds: float = 30.0) -> None:
    """Wait for a condition, or fail."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.005)


def client_of(address: str) -> openai.OpenAI:
    """The official client, without retries."""
    return openai.OpenAI(base_url=address, api_key=KEY, max_retries=0, timeout=60)


def echo(conversation, sampling, on_text, stopped) -> Reply:
    """Answer with the question's words and the request's settings, one word at a time."""
    words = [*shown_text(conversation.messages[-1].text).split(), f"t={sampling.temperature}", f"p={sampling.top_p}"]
    words += [f"k={sampling.top_k}", f"s={sampling.seed}", f"r={sampling.repetition_penalty}"]
    said, ended = "", "marker"
    for n, word in enumerate(words):
        if n == sampling.max_new_tokens:
            ended = "length"
            break
        piece = f" {word}" if n else word
        said += piece
        on_text(piece)
        if stopped():
            ended = "stopped"
            break
    return Reply(said, ended, 7, n + 1, 0.001, 0.001)
