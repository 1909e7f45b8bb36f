"""Render untrusted chat templates in a separate process with limits on memory and CPU time.

Jinja's sandbox does not limit memory or time: a template can build gigabytes from one line, loop for years, or recurse
until the interpreter crashes, and no check of its source finds all such cases. Each process that renders starts
its rendering process at its first request.
"""

import contextlib
import json
import os
import resource
import select
import signal
import subprocess
import sys
import threading

from llava_ds.constants import ConfigError, DataError

CPU_SECONDS = 10  # limit per rendering (normally a millisecond)
WAIT_SECONDS = 300  # timeout for a reply of a stuck process
MEMORY = 2**29  # bytes, in addition to the memory used after the start
BUSY = "free memory and processors, or lower --preprocessing_num_workers"
MAX_TEXT, MAX_GROWTH = 2**20, 64  # maximum characters: a constant, plus a multiple of the conversation's
# Use -c, because -m looks for modules in the current folder first.
START = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from {} import serve; serve({})"
REMEDY = "give --version one of LLaVA's templates, or use another tokenizer"


class TemplateProcess:
    """The rendering process, one per calling process. A template that exceeds a limit ends it and raises
    ConfigError."""

    def __init__(self) -> None:
        # In its own session, so that signals to the run's process group don't reach it. It ends when its stdin closes.
        self._child = subprocess.Popen(
            [sys.executable, "-I", "-c", START.format(__name__, CPU_SECONDS), json.dumps(sys.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._lock = threading.Lock()

    def render(self, **request: object) -> tuple[str, list[tuple[int, int]]]:
        """Render one conversation by render_jinja_template. Raises DataError if the template refuses it."""
        with self._lock:
            reply = self._reply(json.dumps(request).encode() + b"\n")
        if "refused" in reply:
            raise DataError(f"the tokenizer's chat template refuses the conversation: {reply['refused']}")
        if "too_much" in reply:
            raise ConfigError(f"the tokenizer's chat template can't be used: {reply['too_much']}: {REMEDY}")
        return reply["text"], [tuple(span) for span in reply["spans"]]

    @property
    def ended(self) -> bool:
        return self._child.poll() is not None

    def _reply(self, request: bytes) -> dict:
        line, ending = b"", "the process that renders the tokenizer's chat template"
        with contextlib.suppress(BrokenPipeError):
            self._child.stdin.write(request)
            self._child.stdin.flush()
            if not select.select([self._child.stdout], [], [], WAIT_SECONDS)[0]:
                self._child.kill()
                self._child.wait()
                raise ConfigError(f"{ending} gave no answer for {WAIT_SECONDS} seconds: {BUSY}")
            line = self._child.stdout.readline()
        if line.endswith(b"\n"):
            return json.loads(line)
        code = self._child.wait()
        if code == -signal.SIGXCPU:
            return {"too_much": f"it takes longer than {CPU_SECONDS} seconds"}
        if code >= 0:
            return {"too_much": f"its process ended with exit code {code}"}
        raise ConfigError(f"{ending} was ended by {signal.Signals(-code).name}; if memory ran out: {BUSY}")


_of_process: dict[int, TemplateProcess] = {}


def render(**request: object) -> tuple[str, list[tuple[int, int]]]:
    """Render one conversation. Also returns the spans of {% generation %} blocks, with return_assistant_tokens_mask.

    request: render_jinja_template's arguments, with one conversation. Raises DataError for a conversation that the
    template refuses, and ConfigError for a template that exceeds a memory or time limit.
    """
    process = _of_process.get(os.getpid())
    if process is None or process.ended:
        _of_process.clear()  # a forked process must not use its parent's
        process = _of_process[os.getpid()] = TemplateProcess()
    return process.render(**request)


def serve(cpu_seconds: int) -> None:
    """Serve rendering requests: one JSON request per line of stdin, one reply per line of stdout."""
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # keep libraries' output out of the replies
    from transformers.utils.chat_template_utils import render_jinja_template

    with open("/proc/self/statm") as file:
        taken = int(file.read().split()[5]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_DATA, (taken + MEMORY, taken + MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for line in sys.stdin.buffer:
        used = resource.getrusage(resource.RUSAGE_SELF)
        until = int(used.ru_utime + used.ru_stime) + 1 + cpu_seconds
        resource.setrlimit(resource.RLIMIT_CPU, (until, resource.RLIM_INFINITY))
        replies.write(_reply(render_jinja_template, json.loads(line), MAX_TEXT + MAX_GROWTH * len(line)) + b"\n")
        replies.flush()


def _reply(render_jinja_template, request: dict, longest: int) -> bytes:
    try:
        texts, spans = render_jinja_template(**request)
        if len(texts[0]) > longest:
            return json.dumps({"too_much": f"it renders a conversation as {len(texts[0]):,} characters"}).encode()
        marked = request.get("return_assistant_tokens_mask")
        return json.dumps({"text": texts[0], "spans": list(spans[0]) if marked else []}).encode()
    except MemoryError:
        return json.dumps({"too_much": f"it takes more than {MEMORY >> 20} MB"}).encode()
    except RecursionError:
        return json.dumps({"too_much": "it recurses without end"}).encode()
    except Exception as error:  # a template may raise any Python exception
        reason = f"{type(error).__name__}: {error}" if type(error).__module__ == "builtins" else str(error)
        return json.dumps({"refused": reason[:500]}).encode()
