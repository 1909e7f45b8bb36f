"""A queue of several clients' questions, answered one at a time by one thread."""

import queue
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from llava_ds.constants import ConfigError, DataError
from llava_ds.extensions.infer.chat import Conversation
from llava_ds.extensions.infer.generate import Reply
from llava_ds.extensions.infer.infer_flags import Sampling

IDLE_S = 3600.0
# Answers a conversation by chat.ask(). Calls on_text with each piece of text, and stopped() after each token.
Generate = Callable[[Conversation, Sampling, Callable[[str], None], Callable[[], bool]], Reply]


class Closing(Exception):
    """The server shuts down before the answer is finished."""


@dataclass(frozen=True)
class Question:
    """A conversation that ends with a question. stops: texts before the first of which the answer ends."""

    conversation: Conversation
    sampling: Sampling
    stops: tuple[str, ...] = ()


@dataclass(frozen=True)
class Ended:
    """The end of an answer. reply.text: the text, not cut at a stop; finish_reason: OpenAI's "stop" or "length"."""

    reply: Reply
    finish_reason: str


@dataclass
class Job:
    """A question in the queue.

    deliver: called with each piece of the answer, then with Ended or an exception; release: called when the question's
    files can be deleted; cancelled: set to True when the client has left, to end the answer.
    """

    question: Question
    deliver: Callable[[str | Ended | Exception], None]
    release: Callable[[], None]
    cancelled: bool = False


class AnswerQueue:
    """A queue of jobs, answered in order by one thread until close().

    An exception other than DataError or ConfigError is printed, and the next job is answered. With ends_on_failure, for
    ranks that would be out of step, all later jobs instead end as after close(), `failure` is set to the exception, and
    on_failure is called. on_idle: called by the thread after every IDLE_S seconds without a job.
    """

    def __init__(
        self,
        generate: Generate,
        ends_on_failure: bool = False,
        on_failure: Callable[[], None] = lambda: None,
        on_idle: Callable[[], None] = lambda: None,
    ) -> None:
        self._generate, self._ends_on_failure, self._on_failure = generate, ends_on_failure, on_failure
        self._on_idle = on_idle
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self.closing = False  # without a lock, because a signal handler sets it
        self.failure: BaseException | None = None
        self.seconds_per_answer = 1.0  # moving average
        self._thread = threading.Thread(target=self._work, name="answers", daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Append a job to the queue."""
        self._jobs.put(job)

    def close(self) -> None:
        """End the current answer after its next token, end waiting jobs without answers, and join the thread."""
        self.closing = True
        self._jobs.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (job := self._next()) is not None:
            try:
                last = self._answer(job)
            except (DataError, ConfigError) as error:
                last = error
            except Exception as error:
                last = error
                self._failed(error)
            job.release()
            job.deliver(last)

    def _failed(self, error: Exception) -> None:
        traceback.print_exc(file=sys.stderr)
        if self._ends_on_failure:
            self.closing, self.failure = True, error
            self._on_failure()

    def _next(self) -> Job | None:
        while True:
            try:
                return self._jobs.get(timeout=IDLE_S)
            except queue.Empty:
                try:
                    self._on_idle()
                except Exception as error:  # the thread has to survive to end later jobs
                    self._failed(error)

    def _answer(self, job: Job) -> Ended | Exception:
        if self.closing or job.cancelled:
            return Closing()
        text = StoppedText(job.question.stops, job.deliver)
        reply = self._generate(
            job.question.conversation,
            job.question.sampling,
            text.add,
            lambda: text.found or job.cancelled or self.closing,
        )
        text.end()
        self.seconds_per_answer += 0.2 * (reply.seconds - self.seconds_per_answer)
        if self.closing and reply.ended == "stopped" and not text.found:
            return Closing()
        return Ended(reply, "length" if reply.ended == "length" else "stop")


class StoppedText:
    """Forwards text that arrives in pieces, up to the first stop sequence.

    Text that may be the beginning of a stop sequence is held back until more text arrives.
    """

    def __init__(self, stops: Sequence[str], on_text: Callable[[str], None]) -> None:
        self._stops, self._on_text = stops, on_text
        self._held, self.found = "", False

    def add(self, piece: str) -> None:
        """Add the next piece. Sets `found` to True if the text now contains a complete stop sequence."""
        if self.found:
            return
        text = self._held + piece
        places = [place for stop in self._stops if (place := text.find(stop)) >= 0]
        if places:
            self.found, self._held = True, ""
            self._pass_on(text[: min(places)])
            return
        longest = min(max(map(len, self._stops), default=1) - 1, len(text))
        begins = (n for n in range(longest, 0, -1) if any(stop.startswith(text[-n:]) for stop in self._stops))
        kept = next(begins, 0)
        self._held = text[len(text) - kept :]
        self._pass_on(text[: len(text) - kept])

    def end(self) -> None:
        """Flush the held-back text at the end of the answer."""
        self._pass_on(self._held)
        self._held = ""

    def _pass_on(self, text: str) -> None:
        if text:
            self._on_text(text)
