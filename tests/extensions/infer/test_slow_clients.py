"""Clients that send slowly, half or too much: they keep nobody out, and each gets its answer or is let go of."""

import contextlib
import http.client
import json
import socket
import time

import pytest
from endpoint import KEY, MODEL, client_of, echo, endpoint

from llava_ds.extensions.infer import api, local_server
from llava_ds.extensions.infer.api import Limits, most_chars
from llava_ds.extensions.infer.generate import Sampling

HEAD_S, BODY_S, BODY_BYTES = 0.6, 2.0, 300_000
LIMITS = Limits(num_requests=2, body_bytes=BODY_BYTES, body_s=BODY_S, pending_bytes=400_000, text_chars=1000)


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local_server, "HEAD_S", HEAD_S)
        patch.setattr(local_server, "REST_BYTES", 4 * BODY_BYTES)
        patch.setattr(api, "SMALL_BODY_BYTES", 50_000)
        with endpoint(echo, tmp_path_factory.mktemp("uploads"), Sampling(max_new_tokens=3), LIMITS) as (address, _):
            yield address


@contextlib.contextmanager
def connection(address: str, sent: bytes = b""):
    host, port = address.split("/")[2].split(":")
    with socket.create_connection((host, int(port)), timeout=20) as client:
        client.sendall(sent)
        yield client


def head(*lines: str, version: str = "1.1") -> bytes:
    first = (f"POST /v1/chat/completions HTTP/{version}", "Host: x", f"Authorization: Bearer {KEY}")
    return "\r\n".join([*first, *lines, "", ""]).encode()


def received(client: socket.socket) -> bytes:
    """All that comes until the connection ends."""
    parts = []
    while part := client.recv(65536):
        parts.append(part)
    return b"".join(parts)


def ends_within(client: socket.socket, seconds: float) -> bool:
    client.settimeout(seconds)
    try:
        return client.recv(1) == b""
    except ConnectionError:
        return True
    except TimeoutError:
        return False


def asked(address: str, text: str = "a b c", timeout: float = 10) -> str:
    create = client_of(address).with_options(timeout=timeout).chat.completions.create
    return create(model=MODEL, messages=[{"role": "user", "content": text}]).choices[0].message.content


def test_slow_bodies_keep_nobody_out(address):
    with contextlib.ExitStack() as stack:
        slow = [stack.enter_context(connection(address, head("Content-Length: 1000") + b"{")) for _ in range(20)]
        assert [asked(address) for _ in range(3)] == ["a b c"] * 3
        assert slow[0].recv(99).startswith(b"HTTP/1.1 408 ")
    assert asked(address) == "a b c"


def test_slow_large_bodies_fill_no_memory_and_keep_no_small_request_out(address):
    large = head("Content-Length: 290000") + b" " * 280_000
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(connection(address, large))]
        time.sleep(0.3)  # for all of it to be there: two at once may both be refused
        clients += [stack.enter_context(connection(address, large)) for _ in range(3)]
        assert asked(address) == "a b c"
        answers = sorted(client.recv(99)[9:12] for client in clients)
        assert answers == [b"408", b"429", b"429", b"429"]
    assert asked(address) == "a b c"


@pytest.mark.parametrize("sent", [b"", b"POST /v1/chat", head("Content-Length: 5")[:-2], head()[:-1]])
def test_a_head_that_does_not_come_is_not_waited_for(address, sent):
    with connection(address, sent) as client:
        assert not ends_within(client, HEAD_S / 2)
        assert ends_within(client, HEAD_S * 4)


def test_a_head_that_drips_is_not_waited_for(address):
    with connection(address) as client, pytest.raises(ConnectionError):
        end = time.monotonic() + HEAD_S * 6
        for byte in (head("X: " + "y" * 400) + b"z") * 2:
            client.sendall(bytes([byte]))
            time.sleep(0.02)
            assert time.monotonic() < end


def test_the_second_request_of_a_connection_is_not_waited_for_either(address):
    body = json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "a"}]}).encode()
    with connection(address, head(f"Content-Length: {len(body)}") + body) as client:
        answer = b""
        while not answer.endswith(b"}"):
            answer += client.recv(65536)
        assert answer.startswith(b"HTTP/1.1 200 ")
        client.sendall(b"POST /v1")
        assert ends_within(client, HEAD_S * 4)


@pytest.mark.parametrize("more", [(), ("Connection: close",)])
@pytest.mark.parametrize("declared", [True, False])
def test_a_body_over_the_bound_is_answered(address, more, declared):
    """The client sends all of it before it reads the answer."""
    size = 3 * BODY_BYTES
    kind = f"Content-Length: {size}" if declared else "Transfer-Encoding: chunked"
    content = b"x" * size if declared else b"%x\r\n" % size + b"x" * size + b"\r\n0\r\n\r\n"
    with connection(address, head(kind, *more)) as client:
        client.sendall(content)
        time.sleep(0.1)
        answer = received(client)
    assert answer.startswith(b"HTTP/1.1 413 ") and b"the body has more than 300,000 bytes" in answer


def test_the_connection_serves_on_after_a_body_over_the_bound(address):
    client = http.client.HTTPConnection(address.split("/")[2], timeout=20)
    with contextlib.closing(client):
        for body, status in ((b"x" * 2 * BODY_BYTES, 413), (b"{", 400), (b"x" * 2 * BODY_BYTES, 413)):
            client.request("POST", "/v1/chat/completions", body, {"Authorization": f"Bearer {KEY}"})
            response = client.getresponse()
            assert response.status == status and json.loads(response.read())["error"]["message"]


def test_a_wrong_key_is_told_after_a_large_body_too(address):
    wrong = head(f"Content-Length: {BODY_BYTES}", "Connection: close").replace(KEY.encode(), b"wrong-key")
    with connection(address, wrong + b"x" * BODY_BYTES) as client:
        assert received(client).startswith(b"HTTP/1.1 401 ")


def test_a_body_without_end_is_not_read_for_ever(address):
    with connection(address, head("Content-Length: 99999999999")) as client, pytest.raises(ConnectionError):
        end = time.monotonic() + 20
        while time.monotonic() < end:
            client.sendall(b"x" * 65536)


def test_a_client_that_waits_for_a_word_is_told_at_once(address):
    with connection(address, head("Content-Length: 9999999", "Expect: 100-continue", "Connection: close")) as client:
        begun = time.monotonic()
        assert received(client).startswith(b"HTTP/1.1 413 ") and time.monotonic() - begun < BODY_S / 2


def test_text_that_no_context_holds_is_refused_before_it_is_tokenized(address):
    body = json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "a" * 600}] * 2}).encode()
    with connection(address, head(f"Content-Length: {len(body)}", "Connection: close") + body) as client:
        error = json.loads(received(client).partition(b"\r\n\r\n")[2])["error"]
    assert error == {
        "message": "the messages have 1,200 characters, but the model has positions for 1,000 at most: send fewer",
        "type": "invalid_request_error",
        "param": "messages",
        "code": "context_length_exceeded",
    }
    assert asked(address, "b" * 1000).startswith("b" * 1000)


def test_the_longest_text_follows_from_the_longest_token():
    assert most_chars(100, ["a", "abc", ""]) == 300
    assert most_chars(10, []) == 10
    assert most_chars(2**63 - 1, ["abc"]) is None
