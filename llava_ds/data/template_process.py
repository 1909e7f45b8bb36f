"""A process of its own for a stranger's chat template: jinja's sandbox keeps it from the machine, but not from taking
all memory or all time.

A template can build gigabytes out of a line, loop through nothing for years, or recurse until the interpreter ends.
No check of its source finds all of that, so it is rendered where a limit of memory and of CPU time is the kernel's.
The process is started with the first rendering, one for each process that renders, and ends with it.
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

CPU_SECONDS = 10  # of one rendering, which takes a millisecond; however busy the machine is
WAIT_SECONDS = 300  # for an answer, should the process stand still
MEMORY = 2**29  # bytes on top of what it takes to start
BUSY = "free memory and processors, or give fewer --preprocessing_num_workers"
MAX_TEXT, MAX_GROWTH = 2**20, 64  # characters of a text: so many, and so many times those of the conversation
# Not -m, which would look for modules in the current folder first.
START = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from {} import serve; serve({})"
REMEDY = "give --version one of LLaVA's templates, or bring another tokenizer"


class TemplateProcess:
    """Renders for one process of ours. Raises ConfigError for a template that takes too much, which ends it.

    It is started once more where a signal ended it that is not for taking too much time: that is not the template's
    fault.
    """

    def __init__(self) -> None:
        self._start()
        self._lock = threading.Lock()

    def _start(self) -> None:
        # A session of its own: a signal to the group of a run, as stops it, is not for this. It ends with its stdin.
        self._child = subprocess.Popen(
            [sys.executable, "-I", "-c", START.format(__name__, CPU_SECONDS), json.dumps(sys.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def render(self, **asked: object) -> tuple[str, list[tuple[int, int]]]:
        """Render one conversation by transformers' render_jinja_template. Raises DataError where it refuses."""
        with self._lock:
            reply = self._ask(json.dumps(asked).encode() + b"\n")
        if "refused" in reply:
            raise DataError(f"the tokenizer's chat template refuses the conversation: {reply['refused']}")
        if "too_much" in reply:
            raise ConfigError(f"the tokenizer's chat template can't be used: {reply['too_much']}: {REMEDY}")
        if "killed" in reply:
            raise ConfigError(f"the process that renders the tokenizer's chat template {reply['killed']}")
        return reply["text"], [tuple(span) for span in reply["spans"]]

    @property
    def ended(self) -> bool:
        return self._child.poll() is not None

    def _ask(self, request: bytes, again: bool = True) -> dict:
        line = b""
        with contextlib.suppress(BrokenPipeError):
            self._child.stdin.write(request)
            self._child.stdin.flush()
            if not select.select([self._child.stdout], [], [], WAIT_SECONDS)[0]:
                self._child.kill()
                self._child.wait()
                return {"killed": f"gave no answer for {WAIT_SECONDS} seconds: {BUSY}"}
            line = self._child.stdout.readline()
        if line.endswith(b"\n"):
            return json.loads(line)
        code = self._child.wait()
        if code == -signal.SIGXCPU:
            return {"too_much": f"it takes longer than {CPU_SECONDS} seconds"}
        if code >= 0:
            return {"too_much": f"its process ended with exit code {code}"}
        if again:
            self._start()
            return self._ask(request, again=False)
        if code == -signal.SIGKILL:
            return {"killed": f"was killed twice (SIGKILL), as Linux does where there is no memory left: {BUSY}"}
        return {"killed": f"was ended twice by {signal.Signals(-code).name}: {REMEDY}"}


_of_process: dict[int, TemplateProcess] = {}


def render(**asked: object) -> tuple[str, list[tuple[int, int]]]:
    """The text of one conversation, and the spans inside {% generation %} blocks where return_assistant_tokens_mask.

    asked: render_jinja_template's arguments, with one conversation. Raises DataError for a conversation that the
    template refuses, and ConfigError for a template that takes more memory or time than any needs.
    """
    process = _of_process.get(os.getpid())
    if process is None or process.ended:
        _of_process.clear()  # a forked process has its parent's, which is not its own to ask
        process = _of_process[os.getpid()] = TemplateProcess()
    return process.render(**asked)


def serve(cpu_seconds: int) -> None:
    """The process itself: one JSON request a line from stdin, one reply a line to stdout, until stdin ends."""
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print is no reply
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


def _reply(render_jinja_template, asked: dict, longest: int) -> bytes:
    try:
        texts, spans = render_jinja_template(**asked)
        if len(texts[0]) > longest:
            return json.dumps({"too_much": f"it makes {len(texts[0]):,} characters of a conversation"}).encode()
        marked = asked.get("return_assistant_tokens_mask")
        return json.dumps({"text": texts[0], "spans": list(spans[0]) if marked else []}).encode()
    except MemoryError:
        return json.dumps({"too_much": f"it takes more than {MEMORY >> 20} MB"}).encode()
    except RecursionError:
        return json.dumps({"too_much": "it calls itself without end"}).encode()
    except Exception as error:  # a template may raise what any Python expression does
        said = f"{type(error).__name__}: {error}" if type(error).__module__ == "builtins" else str(error)
        return json.dumps({"refused": said[:500]}).encode()
