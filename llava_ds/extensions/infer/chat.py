"""Hold conversations about images in a terminal, with messages, images and commands."""

import contextlib
import json
import secrets
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from llava_ds.constants import IMAGE_TOKEN, ConfigError, DataError
from llava_ds.data.encoded_rows import SizedMedia, layout_of
from llava_ds.data.images.decode import load_media
from llava_ds.data.sample import FileRef, Media, Message
from llava_ds.data.sources.media_parts import Mark
from llava_ds.data.sources.turns import with_marks
from llava_ds.data.special_tokens import LITERAL_IMAGE, join_parts, shown_text
from llava_ds.extensions.infer.generate import Prompt, Reply, stream
from llava_ds.extensions.infer.infer_flags import Sampling
from llava_ds.extensions.infer.load import LoadedModel
from llava_ds.runtime.ranks import Ranks, printable

HISTORY_FILE = "~/.cache/llava_ds/chat_history"  # questions typed in a terminal, for the arrow keys
HISTORY_LINES = 1000
STILL_THERE = ()  # sent by rank 0 instead of a question


@dataclass(frozen=True)
class Conversation:
    """The messages so far, and their images and videos in the order of the placeholders."""

    messages: tuple[Message, ...] = ()
    media: tuple[Media, ...] = ()

    def with_question(self, question: str, shown: Sequence[Media] = ()) -> "Conversation":
        """Add a question about images and videos. Raises DataError if its text contains an image placeholder."""
        text = f"{IMAGE_TOKEN}\n" * len(shown) + _words(question)
        return Conversation((*self.messages, Message("human", text)), (*self.media, *shown))

    def with_parts(self, role: str, parts: Sequence[str | Media]) -> "Conversation":
        """Add a message of parts, joined as in training. Raises DataError if a text contains an image placeholder."""
        shown = [part for part in parts if isinstance(part, Media)]
        text, keeps_spaces = join_parts([None if isinstance(part, Media) else _words(part) for part in parts])
        return Conversation((*self.messages, Message(role, text, keeps_spaces=keeps_spaces)), (*self.media, *shown))

    def with_answer(self, text: str) -> "Conversation":
        """Add the answer to the last question. Removes image placeholders, because they would count as images."""
        return Conversation((*self.messages, Message("gpt", text.replace(IMAGE_TOKEN, ""))), self.media)

    def record(self) -> dict[str, object]:
        """Return a record in LLaVA's JSON format. Raises DataError if there are both images and videos."""
        record: dict[str, object] = {"id": time.strftime("chat-%Y%m%d-%H%M%S")}
        paths = [str(Path(media.refs[0].path).resolve()) for media in self.media]
        kinds = {media.kind for media in self.media}
        if len(kinds) > 1:
            raise DataError("a record of LLaVA's JSON can have images or videos, but this conversation has both")
        if kinds:
            record[kinds.pop()] = paths
        texts = [(message.role, message.text.replace(LITERAL_IMAGE, f"\\{IMAGE_TOKEN}")) for message in self.messages]
        record["conversations"] = [{"from": role, "value": text} for role, text in texts]
        return record


def _words(text: str) -> str:
    """Return the text with escaped placeholders resolved. Raises DataError if it contains other placeholders."""
    marks: list[Mark] = []
    text = with_marks(text, marks, has_videos=False)
    if marks:
        raise DataError(
            f"the question contains {IMAGE_TOKEN}, a placeholder for an image: leave it out, images are given "
            f"separately (\\{IMAGE_TOKEN} is the word)"
        )
    return text


def read_media(kind: str, path: str, loaded: LoadedModel) -> Media:
    """Check that an "image" or "video" can be decoded. Raises DataError, or ConfigError without PyAV."""
    media = Media(kind, (FileRef(str(Path(path).expanduser())),))
    sized = SizedMedia.of(media, loaded.image_options)
    load_media(media, sized.sizes, layout_of(sized, 1, loaded.image_options), loaded.image_options)
    return media


def ask(
    loaded: LoadedModel,
    conversation: Conversation,
    sampling: Sampling,
    on_text: Callable[[str], None] = lambda text: None,
    stopped: Callable[[], bool] = lambda: False,
) -> Reply:
    """Answer a conversation's last question, together with all ranks that share the model. Call it on rank 0.

    If sampling has no seed, a random seed is used on all ranks.
    """
    if sampling.temperature > 0 and sampling.seed is None:
        sampling = replace(sampling, seed=secrets.randbits(31))
    prompt = Prompt(conversation.messages, conversation.media)
    _share(loaded.ranks, (prompt, sampling))
    return stream(loaded, prompt, sampling, on_text, stopped)


def answer_for_rank_0(loaded: LoadedModel) -> None:
    """Generate together with rank 0 until rank 0 ends the conversation. Call it on the other ranks."""
    while (request := _share(loaded.ranks, None)) is not None:
        if request == STILL_THERE:
            continue
        with contextlib.suppress(DataError, ConfigError):  # rank 0 reports the error
            stream(loaded, *request)


def keep_waiting(loaded: LoadedModel) -> None:
    """Restart the other ranks' wait for a question: their collective times out after 12 hours. Call it on rank 0."""
    _share(loaded.ranks, STILL_THERE)


@contextlib.contextmanager
def release_other_ranks(loaded: LoadedModel) -> Iterator[None]:
    """Return a context that releases the other ranks at the end of the conversation, also after a user's error."""
    try:
        yield
    except (DataError, ConfigError):
        _share(loaded.ranks, None)
        raise
    _share(loaded.ranks, None)


def _share(ranks: Ranks | None, request: tuple | None) -> tuple | None:
    """Broadcast rank 0's request."""
    if ranks is None or ranks.world_size == 1:
        return request
    held = [request]
    torch.distributed.broadcast_object_list(held, src=0, group=ranks.patient_group)
    return held[0]


@dataclass
class Session:
    """A conversation in progress. pending: images and videos for the next question."""

    loaded: LoadedModel
    sampling: Sampling
    quiet: bool = False
    pending: list[Media] = field(default_factory=list)
    conversation: Conversation = field(default_factory=Conversation)

    def question(self, text: str) -> None:
        """Ask a question, and stream the answer to stdout. An exception leaves the conversation unchanged."""
        conversation = self.conversation.with_question(text, self.pending)
        with _interruptible() as stopped:
            reply = ask(self.loaded, conversation, self.sampling, _print_piece, stopped)
        print(flush=True)
        self.conversation, self.pending = conversation.with_answer(reply.text), []
        if not self.quiet:
            print_note(speed_line(reply))


def speed_line(reply: Reply) -> str:
    """Return a line with an answer's length and speed."""
    ends = {"marker": "", "length": "; cut off by --max_new_tokens, or no position is left", "stopped": "; stopped"}
    rate = f", then {reply.tokens_per_s:.1f} tokens/s" if reply.num_tokens > 1 else ""
    return (
        f"[prompt {reply.num_prompt_tokens:,} tokens, answer {reply.num_tokens:,}: first after {reply.first_s:.2f} s"
        f"{rate}{ends[reply.ended]}]"
    )


def run_conversation(session: Session, read: Callable[[], str | None]) -> None:
    """Answer questions and run commands until read() returns None.

    User errors are printed, and the conversation continues.
    """
    while (line := read()) is not None:
        line = line.strip()
        if not line:
            continue
        name, _, rest = line.partition(" ")
        try:
            if name in ("/exit", "/quit"):
                return
            if name in COMMANDS:
                COMMANDS[name].run(session, rest.strip())
            elif name.startswith("/") and "/" not in name[1:]:
                raise DataError(f"{name} is not a command: {', '.join(COMMANDS)}, /exit")
            else:
                session.question(line)
        except (DataError, ConfigError) as error:
            print_note(f"error: {error}")


def print_note(line: str) -> None:
    """Print a line that is not part of an answer to stderr."""
    print(printable(line, keep="\n\t"), file=sys.stderr, flush=True)


def _print_piece(text: str) -> None:
    print(printable(text, keep="\n\t"), end="", flush=True)


@contextlib.contextmanager
def _interruptible() -> Iterator[Callable[[], bool]]:
    """Yield a function that returns True after Ctrl-C is pressed. Pressing it again raises KeyboardInterrupt."""
    pressed = []

    def handler(signum: int, frame: object) -> None:
        if pressed:
            raise KeyboardInterrupt
        pressed.append(signum)

    before = signal.signal(signal.SIGINT, handler)
    try:
        yield lambda: bool(pressed)
    finally:
        signal.signal(signal.SIGINT, before)


@dataclass(frozen=True)
class Command:
    """A command that begins with a slash: its argument's name, a help text, and the function."""

    argument: str
    help: str
    run: Callable[[Session, str], None]


def _add(kind: str) -> Callable[[Session, str], None]:
    def run(session: Session, rest: str) -> None:
        for path in _paths(rest):
            session.pending.append(read_media(kind, path, session.loaded))
        if not session.pending:
            raise DataError(f"/{kind} needs the path of a file")
        if not session.quiet:
            print_note(f"[the next question shows {', '.join(media.refs[0].path for media in session.pending)}]")

    return run


def _paths(rest: str) -> list[str]:
    """Return the text as a single path if this file exists, else split it into paths like a shell."""
    if Path(rest).expanduser().is_file():
        return [rest]
    try:
        return shlex.split(rest)
    except ValueError as error:
        raise DataError(f"{rest}: {error}") from error


def _history(session: Session, rest: str) -> None:
    left = list(session.conversation.media)
    for message in session.conversation.messages:
        for _ in range(message.text.count(IMAGE_TOKEN)):
            print_note(f"[{left[0].kind} {left.pop(0).refs[0].path}]")
        print_note(f"{'>' if message.role == 'human' else '<'} {shown_text(message.text).strip()}")
    for media in session.pending:
        print_note(f"[{media.kind} {media.refs[0].path}, for the next question]")


def _reset(session: Session, rest: str) -> None:
    session.conversation, session.pending = Conversation(), []


def _save(session: Session, rest: str) -> None:
    if not rest:
        raise DataError("/save needs the path of a file to write")
    text = json.dumps([session.conversation.record()], indent=1, ensure_ascii=False) + "\n"
    try:
        with open(Path(rest).expanduser(), "x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise DataError(f"{rest} can't be written ({error.strerror}): name another file") from error


def _help(session: Session, rest: str) -> None:
    for name, command in COMMANDS.items():
        print_note(f"{name + ' ' + command.argument:16}{command.help}")
    print_note("/exit, Ctrl-D    leave; Ctrl-C ends an answer")


COMMANDS = {
    "/image": Command("PATH", "show an image, or several, with the next question", _add("image")),
    "/video": Command("PATH", "show a video with the next question", _add("video")),
    "/history": Command("", "show the conversation so far", _history),
    "/reset": Command("", "begin a new conversation, without images", _reset),
    "/save": Command("PATH", "write the conversation as LLaVA's JSON", _save),
    "/help": Command("", "these commands", _help),
}


def make_line_reader() -> Callable[[], str | None]:
    """Return a function that reads a line from a terminal, with the history of earlier sessions, or from a pipe."""
    if not sys.stdin.isatty():
        return lambda: sys.stdin.readline() or None
    _remember_lines()

    def read() -> str | None:
        while True:
            try:
                return input("> ")
            except EOFError:
                print()
                return None
            except KeyboardInterrupt:
                print("\n(Ctrl-D leaves)")

    return read


def _remember_lines() -> None:
    """Load readline's history from a file that only its owner can read, and save it at exit."""
    import atexit

    try:
        import readline
    except ImportError:  # readline is missing on some systems, where lines are read without history
        return
    file = Path(HISTORY_FILE).expanduser()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch(mode=0o600)
        readline.read_history_file(file)
    except OSError as error:
        print_note(f"{file} can't be used ({error.strerror}): questions are not remembered")
        return
    readline.set_history_length(HISTORY_LINES)
    atexit.register(readline.write_history_file, file)
