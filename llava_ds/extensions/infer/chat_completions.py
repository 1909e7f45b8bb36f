"""Parse requests for OpenAI's chat completions, and format answers, chunks and errors."""

import base64
import binascii
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import pydantic_core
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from llava_ds.constants import IMAGE_TOKEN, ConfigError, DataError, did_you_mean, in_short
from llava_ds.data.sample import FileRef, Media
from llava_ds.extensions.infer.answer_queue import Closing, Ended, Question
from llava_ds.extensions.infer.chat import Conversation
from llava_ds.extensions.infer.generate import Reply
from llava_ds.extensions.infer.infer_flags import Sampling

MAX_MESSAGES, MAX_PARTS, MAX_STOPS, MAX_STOP_CHARS = 1024, 1024, 16, 256
MAX_FIELDS = 64  # maximum number of an object's fields
MAX_VALUES = 1 << 20  # maximum number of values in a body, because each takes a hundred bytes of memory
MIN_TEMPERATURE = 0.01  # dividing scores by smaller values would overflow
SHOWN_PROBLEMS, SHOWN_CHARS = 3, 200  # limits for messages about a request

# OpenAI's parameters that are accepted only with these values.
ONLY: dict[str, tuple[object, ...]] = {
    "n": (1,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "tools": ([],),
    "tool_choice": ("none",),
    "functions": ([],),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "store": (False,),
}


class RequestError(Exception):
    """The refusal of a request, formatted as OpenAI's error object. param: the field with the problem."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None, retry_after_s: int = 0
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code
        self.headers = {"Retry-After": str(retry_after_s)} if retry_after_s else {}

    def content(self) -> dict[str, object]:
        """Return the body of the response."""
        kind = "server_error" if self.status >= 500 else "rate_limit_error" if self.status == 429 else _INVALID
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


_INVALID = "invalid_request_error"


class _Strict(BaseModel):
    """A pydantic model that treats null fields as absent and rejects unknown fields."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _without_null(cls, fields: object) -> object:
        if not isinstance(fields, dict):
            return fields
        if len(fields) > MAX_FIELDS:
            raise ValueError(f"it has {len(fields):,} fields")
        return {name: value for name, value in fields.items() if value is not None}


class _Text(_Strict):
    type: Literal["text"]
    text: str


class _Url(_Strict):
    url: str
    detail: Literal["auto"] = "auto"


class _Image(_Strict):
    type: Literal["image_url"]
    image_url: _Url


_Part = Annotated[_Text | _Image, Field(discriminator="type")]
_FAST = {"fail_fast": True}  # stop at a list's first problem, because there may be a million


def _parts(content: object) -> object:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


class _Message(_Strict):
    role: Literal["system", "user", "assistant"]
    content: Annotated[list[_Part], Field(max_length=MAX_PARTS, **_FAST), BeforeValidator(_parts)]


class _StreamOptions(_Strict):
    include_usage: bool = False


_Count = Annotated[int, Field(ge=1, lt=2**31)]


class _Body(_Strict):
    """The parameters of a request that change the answer or its format. ONLY has the other accepted parameters."""

    model: str
    messages: Annotated[list[_Message], Field(min_length=1, max_length=MAX_MESSAGES, **_FAST)]
    max_tokens: _Count | None = None
    max_completion_tokens: _Count | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    stop: Annotated[
        list[Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]],
        Field(max_length=MAX_STOPS, **_FAST),
        BeforeValidator(lambda stop: [stop] if isinstance(stop, str) else stop),
    ] = []
    stream: bool = False
    stream_options: _StreamOptions | None = None


@dataclass(frozen=True)
class Completion:
    """A parsed request. places: maps each image file to its location in the request, for error messages."""

    question: Question
    streams: bool
    includes_usage: bool
    places: Mapping[str, str]


def read_completion(body: bytes, model: str, defaults: Sampling, folder: Path) -> Completion:
    """Parse the body of a request for the model with this name, and write its images into a folder.

    defaults: values of parameters that the request omits. Raises RequestError if the request is invalid.
    """
    request = _parsed(body)
    if request.model != model:
        raise RequestError(
            404, f"model {in_short(request.model)!r} not found, only {model!r} is served", param="model", code=_NO_MODEL
        )
    places: dict[str, str] = {}
    conversation = _conversation(request.messages, folder, places)
    question = Question(conversation, _sampling(request, defaults), tuple(request.stop))
    if request.stream_options is not None and not request.stream:
        raise RequestError(400, "stream_options goes with stream: true", param="stream_options")
    includes_usage = request.stream_options is not None and request.stream_options.include_usage
    return Completion(question, request.stream, includes_usage, places)


_NO_MODEL = "model_not_found"


def _parsed(body: bytes) -> _Body:
    if sum(map(body.count, (b",", b"[", b"{"))) > MAX_VALUES:
        raise RequestError(413, f"the body has more than {MAX_VALUES:,} values")
    try:
        fields = pydantic_core.from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise RequestError(400, f"the body can't be read as JSON: {error}") from None
    if not isinstance(fields, dict):
        raise RequestError(400, "the body is not a JSON object: expected one with model and messages")
    for name, allowed in ONLY.items():
        value = fields.pop(name, None)
        if value is not None and not any(value == one and type(value) in _kinds(one) for one in allowed):
            only = ", ".join(json.dumps(one) for one in allowed)
            raise RequestError(400, f"{name} can only be {only} here: leave it out", param=name, code="unsupported")
    try:
        return _Body.model_validate(fields)
    except ValidationError as error:
        raise _refusal(error) from None


def _kinds(value: object) -> tuple[type, ...]:
    return (int, float) if type(value) is int else (type(value),)


def _refusal(error: ValidationError) -> RequestError:
    problems = error.errors(include_url=False, include_context=False, include_input=False)
    lines, first = [], None
    for problem in problems[:SHOWN_PROBLEMS]:
        place = _place(problem["loc"])
        first = first or place
        what = problem["msg"][:SHOWN_CHARS]
        if problem["type"] == "extra_forbidden":
            what = "it is not known here: " + did_you_mean(place, [*_Body.model_fields, *ONLY], "leave it out")
        lines.append(f"{place}: {what}" if place else what)
    if len(problems) > SHOWN_PROBLEMS:
        lines.append(f"and {len(problems) - SHOWN_PROBLEMS:,} more")
    return RequestError(400, "; ".join(lines), param=first)


def _place(loc: tuple[int | str, ...]) -> str:
    """Format pydantic's location of a field, like messages[0].content[1].image_url.

    Leaves out the type of a part, because pydantic inserts it before the part's fields.
    """
    place, before = "", None
    for part in loc:
        if isinstance(part, int):
            place += f"[{part}]"
        elif part != before:
            place += f"{'.' if place else ''}{in_short(part)}"
        before = part
    return place


def _sampling(request: _Body, defaults: Sampling) -> Sampling:
    most = [n for n in (request.max_tokens, request.max_completion_tokens) if n is not None]
    if len(set(most)) > 1:
        raise RequestError(400, "max_tokens and max_completion_tokens differ: give one of them", param="max_tokens")
    if request.temperature is not None and 0 < request.temperature < MIN_TEMPERATURE:
        raise RequestError(
            400,
            f"temperature is {request.temperature}: give 0 for the likeliest tokens, or at least {MIN_TEMPERATURE}",
            param="temperature",
        )
    given = {
        "max_new_tokens": most[0] if most else None,
        **{name: getattr(request, name) for name in ("temperature", "top_p", "top_k", "repetition_penalty", "seed")},
    }
    return replace(defaults, **{name: value for name, value in given.items() if value is not None})


def _conversation(messages: list[_Message], folder: Path, places: dict[str, str]) -> Conversation:
    """Build the conversation. Adds each image's file and location to `places`."""
    conversation = Conversation()
    for i, message in enumerate(messages):
        where = f"messages[{i}]"
        images = [part for part in message.content if isinstance(part, _Image)]
        if images and message.role != "user":
            raise RequestError(400, f"{where} is from {message.role!r}: images belong to 'user'", param=where)
        if message.role == "system" and i > 0:
            raise RequestError(400, f"{where} is from 'system', but only the first message can be", param=where)
        if message.role == "assistant" and not any(before.role == "human" for before in conversation.messages):
            raise RequestError(400, f"{where} is an answer before any question: leave it out", param=where)
        texts = [part.text for part in message.content if isinstance(part, _Text)]
        if message.role == "user" and not images and not "".join(texts).strip():
            raise RequestError(400, f"{where} has no text and no image", param=where)
        if message.role == "assistant":  # placeholders in the model's own words are plain text
            conversation = conversation.with_parts("gpt", [text.replace(IMAGE_TOKEN, "") for text in texts])
            continue
        parts = [
            part.text if isinstance(part, _Text) else _written(part, f"{where}.content[{k}].image_url", folder, places)
            for k, part in enumerate(message.content)
        ]
        try:
            conversation = conversation.with_parts({"user": "human"}.get(message.role, message.role), parts)
        except DataError as error:
            raise RequestError(400, f"{where}: {error}", param=where) from None
    if messages[-1].role != "user":
        raise RequestError(400, "the last message is not from 'user': end with a question", param="messages")
    return conversation


def _written(part: _Image, place: str, folder: Path, places: dict[str, str]) -> Media:
    """Write a part's image into the folder. Adds its file and location to `places`."""
    file = folder / f"{len(places)}"
    file.write_bytes(_bytes_of(part.image_url.url, place))
    places[str(file)] = place
    return Media("image", (FileRef(str(file)),))


def _bytes_of(url: str, place: str) -> bytes:
    head, comma, data = url.partition(",")
    kind, *options = head.removeprefix("data:").split(";")
    if not head.startswith("data:") or not comma or not kind.startswith("image/") or options != ["base64"]:
        raise RequestError(
            400,
            f"{place}: expected a data URL like data:image/png;base64,iVBO...; nothing is fetched, and no file is read",
            param=place,
        )
    try:
        return base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError) as error:
        raise RequestError(400, f"{place}: not base64 ({error})", param=place) from None


def as_request_error(error: Exception, places: Mapping[str, str]) -> RequestError:
    """Convert an exception raised during an answer to a RequestError. places: see Completion."""
    if isinstance(error, RequestError):
        return error
    if isinstance(error, Closing):
        return RequestError(503, "the server is stopping: retry when it is back", code="closing", retry_after_s=10)
    if not isinstance(error, (DataError, ConfigError)):
        return RequestError(500, f"the answer failed ({type(error).__name__}): see the server's output")
    message, param = str(error), None
    for file, place in places.items():
        if file in message:
            message, param = message.replace(file, place), place
    return RequestError(400, message, param=param)


@dataclass(frozen=True)
class Writer:
    """Formats the responses to one request. id: the completion's id; model: the model's name."""

    id: str
    model: str

    def whole(self, text: str, end: Ended) -> dict[str, object]:
        """Return the response to a non-streaming request."""
        message = {"role": "assistant", "content": text, "refusal": None}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": end.finish_reason}
        return {**self._head("chat.completion"), "choices": [choice], "usage": _usage(end.reply)}

    def chunk(self, delta: dict[str, str], finish_reason: str | None = None) -> str:
        """Return a chunk of a streamed response, as an event."""
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        return event({**self._head("chat.completion.chunk"), "choices": [choice]})

    def usage(self, end: Ended) -> str:
        """Return the final chunk, with the token counts and without choices."""
        return event({**self._head("chat.completion.chunk"), "choices": [], "usage": _usage(end.reply)})

    def _head(self, kind: str) -> dict[str, object]:
        return {"id": self.id, "object": kind, "created": int(time.time()), "model": self.model}


LAST_EVENT = "data: [DONE]\n\n"


def event(content: dict[str, object]) -> str:
    """Format a server-sent event."""
    return f"data: {json.dumps(content, ensure_ascii=False)}\n\n"


def _usage(reply: Reply) -> dict[str, int]:
    prompt, answer = reply.num_prompt_tokens, reply.num_tokens
    return {"prompt_tokens": prompt, "completion_tokens": answer, "total_tokens": prompt + answer}
