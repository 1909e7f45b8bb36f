"""Requests for the endpoint that no client should send, from a seed."""

import base64
import json
import random
from collections.abc import Iterator

from endpoint import KEY, MODEL

ODD = (
    None, True, -1, 0, 1e308, -0.0, 10**30, "", "x", "\u0000", "<image>", "\ufffe", [], {}, [[]], [None], {"a": {}},
    "data:image/png;base64,", "data:image/png;base64,AAAA", "http://127.0.0.1/x.png", "file:///etc/passwd", ["x"] * 99,
)  # fmt: skip


def malformed(number: int, seed: int) -> Iterator[tuple[bytes, str]]:
    """(body, key): each is wrong in one way at least."""
    rng = random.Random(seed)
    for _ in range(number):
        yield rng.choice(KINDS)(rng), rng.choice(["", "wrong", KEY + "x"]) if rng.random() < 0.05 else KEY


def _good(rng: random.Random) -> dict:
    image = base64.b64encode(rng.randbytes(40)).decode()
    part = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{image}"}}
    return {"model": MODEL, "messages": [{"role": "user", "content": [part, {"type": "text", "text": "What?"}]}]}


def _no_json(rng: random.Random) -> bytes:
    return rng.randbytes(rng.randrange(200))


def _cut(rng: random.Random) -> bytes:
    body = json.dumps(_good(rng)).encode()
    return body[: rng.randrange(len(body))]


def _deep(rng: random.Random) -> bytes:
    depth = rng.choice((50, 5_000, 90_000))
    return b'{"model": "toy", "messages": ' + rng.choice((b"[", b'{"a":')) * depth


def _odd_field(rng: random.Random) -> bytes:
    name = rng.choice(
        ("messages", "n", "tools", "stop", "response_format", "stream_options", "logit_bias", "user", "x" * 5_000)
    )
    value = rng.choice([odd for odd in ODD if odd not in (None, 1, {}, [], "", "x")] + [{"type": "json_object"}])
    return json.dumps({**_good(rng), name: [value, 7] if name == "stop" else value}).encode()


def _odd_number(rng: random.Random) -> bytes:
    name = rng.choice(("temperature", "top_p", "top_k", "max_tokens", "seed", "repetition_penalty"))
    text = rng.choice(
        ("-1", "1e999", "NaN", "-Infinity", "9" * 5_000, "1" + "0" * 30, '"1"', "true", "[]", "1e-300", "{}")
    )
    if text == "1e-300":
        name = "temperature"
    return json.dumps({**_good(rng), name: "@"}).replace('"@"', text).encode()


def _odd_message(rng: random.Random) -> bytes:
    request = _good(rng)
    message = request["messages"][0]
    where = rng.choice(("role", "content", "part", "type", "url", "more"))
    odd = rng.choice([odd for odd in ODD if odd not in ("x", True, "\u0000", "\ufffe")])
    if where in ("role", "content"):
        message[where] = odd
    elif where == "part":
        message["content"][0] = odd
    elif where == "more":
        request["messages"].append({"role": rng.choice(("assistant", "system", "tool")), "content": "y"})
    else:
        message["content"][0] = {"type": odd} if where == "type" else {"type": "image_url", "image_url": {"url": odd}}
        if odd == "data:image/png;base64," or odd == "data:image/png;base64,AAAA":
            message["role"] = "system"
    return json.dumps(request).encode()


def _surrogates(rng: random.Random) -> bytes:
    return json.dumps(_good(rng)).replace("What?", rng.choice(("\\ud800", "\\udfff x", "\\u00"))).encode()


def _too_many(rng: random.Random) -> bytes:
    many = rng.choice(
        (
            {"messages": [{"role": "user", "content": "x"}] * 1_500},
            {"messages": [{"role": "user", "content": [{"type": "text", "text": ""}] * 2_000}]},
            {"messages": [{"role": "user", "content": [{"type": "x"}] * 1_000}] * 3},
            {f"field{i}": i for i in range(9_000)},
            {"stop": [str(i) for i in range(100)]},
            {"stop": "x" * 1_000},
        )
    )
    return json.dumps({**_good(rng), **many}).encode()


KINDS = (_no_json, _cut, _deep, _odd_field, _odd_number, _odd_message, _surrogates, _too_many)
