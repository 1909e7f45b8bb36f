"""llama.cpp's server with an exported folder."""

import contextlib
import json
import os
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from launching import ROOT

from llava_ds.runtime.launchers import free_port

WITH_LLAMA_CPP = [
    pytest.mark.long,
    pytest.mark.skipif(
        "LLAMA_CPP" not in os.environ, reason="make serve-check-gguf names the environment in LLAMA_CPP"
    ),
]

GREEDY = {"n_predict": 24, "temperature": 0, "ignore_eos": True, "return_tokens": True, "cache_prompt": False}


@contextlib.contextmanager
def serving(folder: Path, log_file: Path) -> Iterator[Callable[[str, dict], dict]]:
    """Start llama.cpp's server with a folder; yields a function that posts JSON to it."""
    port = free_port()
    command = [f"{os.environ['LLAMA_CPP']}/bin/python", ROOT / "run/dev/serving/llama_server.py", folder, str(port)]

    def post(path: str, body: dict) -> dict:
        url, data = f"http://127.0.0.1:{port}{path}", json.dumps(body).encode()
        request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as response:
            return json.loads(response.read())

    with log_file.open("w") as log:
        server = subprocess.Popen([*command, "exact"], stdout=log, stderr=subprocess.STDOUT)
    try:
        end = time.monotonic() + 120
        while True:
            try:
                post("/tokenize", {"content": "x"})
                break
            except (urllib.error.URLError, OSError):
                assert server.poll() is None and time.monotonic() < end, log_file.read_text()
                time.sleep(0.1)
        yield post
    finally:
        server.terminate()
        server.wait(60)
