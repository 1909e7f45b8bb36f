"""Serve OpenAI's chat completions to programs on the same machine, with fastapi.

Parameters with fastapi's types have no annotations, because fastapi is imported only if it is needed.
"""

import asyncio
import contextlib
import dataclasses
import math
import os
import re
import secrets
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from llava_ds.constants import ConfigError
from llava_ds.extensions.infer.answer_queue import AnswerQueue, Ended, Job
from llava_ds.extensions.infer.chat import ask, keep_waiting, print_note, speed_line
from llava_ds.extensions.infer.chat_completions import (
    LAST_EVENT,
    Completion,
    RequestError,
    Writer,
    as_request_error,
    event,
    read_completion,
)
from llava_ds.extensions.infer.infer_flags import Sampling
from llava_ds.extensions.infer.load import LoadedModel
from llava_ds.extensions.infer.local_server import ADDRESS, listening, make_server

KEY_VARIABLE = "LLAVA_DS_API_KEY"
MAX_BODY_BYTES = 16 << 20
BODY_S = 30.0  # seconds for a client to send its request
# This many bytes of each body don't count towards pending_bytes, so that large requests don't block small ones.
SMALL_BODY_BYTES = 256 << 10
ENDING_S = 10  # seconds at shutdown to answer open requests with an error


def check_server_packages() -> None:
    """Raise ConfigError if fastapi or uvicorn is not installed."""
    try:
        import fastapi  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"--serve needs fastapi and uvicorn ({error}): pip install 'llava_ds[serve]'") from error


def api_key() -> tuple[str, bool]:
    """Return the key that clients have to send, and True if it was generated now. Raises ConfigError for a bad key."""
    key = os.environ.get(KEY_VARIABLE)
    if key is None:
        return secrets.token_urlsafe(24), True
    if not re.fullmatch(r"[!-~]{8,200}", key):
        raise ConfigError(f"{KEY_VARIABLE} is not a valid key: set it to 8 to 200 characters of ASCII without spaces")
    return key, False


@dataclass(frozen=True)
class Limits:
    """Limits on requests.

    num_requests: requests in progress or waiting; body_bytes: size of a body; body_s: seconds for a client to send it;
    pending_bytes: total size of large bodies being received; text_chars: characters in all messages of a request.
    """

    num_requests: int
    body_bytes: int = MAX_BODY_BYTES
    body_s: float = BODY_S
    pending_bytes: int = 16 * MAX_BODY_BYTES
    text_chars: int | None = None


def serve_api(loaded: LoadedModel, name: str, sampling: Sampling, port: int, limits: Limits, quiet: bool) -> None:
    """Answer requests until SIGINT or SIGTERM.

    name: the model's name; sampling: defaults for requests. Raises ConfigError if the port is taken. Re-raises an
    exception that left other ranks out of step.
    """
    key, is_new = api_key()
    limits = dataclasses.replace(limits, text_chars=most_chars(loaded.context_tokens, loaded.tokenizer.get_vocab()))

    def generate(conversation, sampling, on_text, stopped):
        reply = ask(loaded, conversation, sampling, on_text, stopped)
        if not quiet:
            print_note(speed_line(reply))
        return reply

    def end() -> None:
        answers.closing = server.should_exit = True

    shares = loaded.ranks is not None and loaded.ranks.world_size > 1
    with tempfile.TemporaryDirectory(prefix="llava_ds-serve-") as uploads, listening(port) as listener:
        answers = AnswerQueue(generate, shares, end, lambda: keep_waiting(loaded))
        app = build_app(Service(answers, name, sampling, key, limits, Path(uploads)))
        line = f"http://{ADDRESS}:{listener.getsockname()[1]}/v1 serves {name}, key {key if is_new else KEY_VARIABLE}"
        server = make_server(app, line, end, ENDING_S)
        try:
            server.run(sockets=[listener])
        finally:
            answers.close()
    if answers.failure is not None:
        raise answers.failure


def most_chars(context_tokens: int, vocabulary: Iterable[str]) -> int | None:
    """Return the maximum number of characters that fit in the model's context; None if it is unlimited.

    Requests are checked by characters, because tokenizing megabytes of text takes seconds and would block all answers.
    """
    return None if context_tokens == sys.maxsize else context_tokens * max(map(len, vocabulary), default=1)


@dataclass
class Service:
    """State shared by the endpoint's functions. uploads: a folder for images."""

    answers: AnswerQueue
    name: str
    sampling: Sampling
    key: str
    limits: Limits
    uploads: Path
    started: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        self._places = threading.BoundedSemaphore(self.limits.num_requests)
        self._pending_bytes = 0  # used by the event loop only

    def check_key(self, request) -> None:
        """Raise RequestError for a request without the key."""
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        if not secrets.compare_digest(given.encode(), self.key.encode()):
            raise RequestError(401, "no key, or a wrong one: send Authorization: Bearer KEY", code="invalid_api_key")

    def model(self) -> dict[str, object]:
        """Return OpenAI's description of the model."""
        return {"id": self.name, "object": "model", "created": self.started, "owned_by": "llava_ds"}

    async def body(self, request) -> bytes:
        """Read the body of a request.

        Raises RequestError if it is too long or arrives too slowly, or if the bodies being received exceed the limit.
        """
        limits, body, counted = self.limits, bytearray(), 0
        too_long = RequestError(
            413, f"the body has more than {limits.body_bytes:,} bytes: send smaller or fewer images"
        )

        async def read() -> None:
            nonlocal counted
            async for part in request.stream():
                body.extend(part)
                large = max(0, len(body) - SMALL_BODY_BYTES)
                self._pending_bytes, counted = self._pending_bytes + large - counted, large
                if len(body) > limits.body_bytes:
                    raise too_long
                if large and self._pending_bytes > limits.pending_bytes:
                    raise RequestError(
                        429, "too many large bodies are being sent: ask again later", code="queue_full", retry_after_s=1
                    )

        declared = request.headers.get("content-length", "")
        if declared.isdecimal() and int(declared[:20]) > limits.body_bytes:
            raise too_long
        try:
            await asyncio.wait_for(read(), limits.body_s)
        except asyncio.TimeoutError:
            raise RequestError(408, f"the body did not come within {limits.body_s:.0f} s") from None
        finally:
            self._pending_bytes -= counted
        return bytes(body)

    def check_length(self, completion: Completion) -> None:
        """Raise RequestError for messages with so many characters that they can't fit in the model's context."""
        count, most = (
            sum(len(message.text) for message in completion.question.conversation.messages),
            self.limits.text_chars,
        )
        if most is not None and count > most:
            raise RequestError(
                400,
                f"the messages have {count:,} characters, but the model has positions for {most:,} at most: send fewer",
                param="messages",
                code="context_length_exceeded",
            )

    @contextlib.contextmanager
    def place(self):
        """Reserve a place for a request. Yields a temporary folder, and a function that releases place and folder.

        If the block raises, both are released. Raises RequestError if too many requests are open.
        """
        if not self._places.acquire(blocking=False):
            wait = max(1, math.ceil(self.answers.seconds_per_answer))
            problem = f"{self.limits.num_requests} requests are open: ask again later"
            raise RequestError(429, problem, code="queue_full", retry_after_s=wait)
        folder = Path(tempfile.mkdtemp(dir=self.uploads))

        def release() -> None:
            shutil.rmtree(folder, ignore_errors=True)
            self._places.release()

        try:
            yield folder, release
        except BaseException:
            release()
            raise


def build_app(service: Service):
    """Build the application: /health, /v1/models and /v1/chat/completions."""
    from fastapi import FastAPI, Request
    from fastapi.responses import JSONResponse, Response
    from starlette.exceptions import HTTPException
    from starlette.requests import ClientDisconnect

    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)

    async def refusal(request: Request, error: RequestError) -> Response:
        if closes(request) and error.status != 408:
            await _drop_rest(request, service.limits)
        return JSONResponse(error.content(), error.status, error.headers)

    async def unknown(request: Request, error: HTTPException) -> Response:
        known = "POST /v1/chat/completions, GET /v1/models and GET /health"
        found = RequestError(error.status_code, f"{request.method} {request.url.path}: there are {known}")
        found.headers = dict(error.headers or {})
        return await refusal(request, found)

    async def failed(request: Request, error: Exception) -> Response:
        return await refusal(request, as_request_error(error, {}))

    app.add_exception_handler(RequestError, refusal)
    app.add_exception_handler(HTTPException, unknown)
    app.add_exception_handler(ClientDisconnect, lambda *_: Response(status_code=499))  # nobody reads the response
    app.add_exception_handler(Exception, failed)

    @app.get("/health")
    def health():
        return {"status": "ok"}

    @app.get("/v1/models")
    def models(request: Request):
        service.check_key(request)
        return {"object": "list", "data": [service.model()]}

    @app.get("/v1/models/{name:path}")
    def model(request: Request, name: str):
        service.check_key(request)
        if name != service.name:
            raise RequestError(404, f"this server only has the model {service.name!r}", code="model_not_found")
        return service.model()

    @app.post("/v1/chat/completions")
    async def complete(request: Request):
        service.check_key(request)
        body = await service.body(request)  # before reserving a place, so that slow clients don't block others
        with service.place() as (folder, release):
            completion = read_completion(body, service.name, service.sampling, folder)
            del body
            service.check_length(completion)
            answer = _Answer(completion, Writer(f"chatcmpl-{secrets.token_hex(12)}", service.name))
            job = answer.job = Job(completion.question, answer.deliver, release)
        service.answers.submit(job)
        return await answer.response(request)

    return app


def closes(request) -> bool:
    """Return True if the connection ends with the response."""
    words = request.headers.get("connection", "").lower().replace(",", " ").split()
    return "close" in words or request.scope["http_version"] == "1.0"


async def _drop_rest(request, limits: Limits) -> None:
    """Read and discard the rest of a body, up to a limit, before a connection is closed.

    Closing it with unread bytes would lose the response. uvicorn does this for connections that stay open.
    """
    from starlette.requests import ClientDisconnect

    dropped = 0
    if request.headers.get("expect", "").lower() == "100-continue":
        return  # the client waits for a response before sending the body
    with contextlib.suppress(asyncio.TimeoutError, RuntimeError, ClientDisconnect):  # RuntimeError: all of it was read
        async with asyncio.timeout(limits.body_s):
            async for part in request.stream():
                dropped += len(part)
                if dropped > 4 * limits.body_bytes:
                    return


class _Answer:
    """Passes one answer from the queue's thread to the client."""

    job: Job

    def __init__(self, completion: Completion, writer: Writer) -> None:
        self._completion, self._writer = completion, writer
        self._loop, self._events = asyncio.get_running_loop(), asyncio.Queue()

    def deliver(self, item: str | Ended | Exception) -> None:
        """Accept a part of the answer. Called in the queue's thread."""
        with contextlib.suppress(RuntimeError):  # raised after the event loop is closed, when no client waits
            self._loop.call_soon_threadsafe(self._events.put_nowait, item)

    async def response(self, request):
        """Return a response with the complete answer, or one that streams it. Raises RequestError.

        A streaming response starts only at the first piece, so that earlier errors can set the HTTP status.
        """
        from fastapi.responses import JSONResponse, StreamingResponse

        watch = asyncio.create_task(self._cancel_when_gone(request))
        try:
            item = await self._next()
            if self._completion.streams:
                chunks = self._chunks(item, watch)
                return StreamingResponse(chunks, media_type="text/event-stream", headers=_NOT_CACHED)
            pieces = []
            while isinstance(item, str):
                pieces.append(item)
                item = await self._next()
        except RequestError:
            watch.cancel()
            raise
        watch.cancel()
        return JSONResponse(self._writer.whole("".join(pieces), item))

    async def _next(self) -> str | Ended:
        item = await self._events.get()
        if isinstance(item, Exception):
            raise as_request_error(item, self._completion.places)
        return item

    async def _cancel_when_gone(self, request) -> None:
        while not self.job.cancelled:
            self.job.cancelled = (await request.receive())["type"] == "http.disconnect"

    async def _chunks(self, item: str | Ended, watch: asyncio.Task) -> AsyncIterator[str]:
        try:
            yield self._writer.chunk({"role": "assistant", "content": ""})
            while isinstance(item, str):
                yield self._writer.chunk({"content": item})
                item = await self._next()
            yield self._writer.chunk({}, item.finish_reason)
            if self._completion.includes_usage:
                yield self._writer.usage(item)
            yield LAST_EVENT
        except RequestError as error:
            yield event(error.content())
        finally:
            self.job.cancelled = True  # watch may be cancelled before it notices that the client left
            watch.cancel()


_NOT_CACHED = {"Cache-Control": "no-store"}
