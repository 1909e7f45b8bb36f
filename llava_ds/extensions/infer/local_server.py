"""A server that only this machine reaches: its socket, and uvicorn around an application."""

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterator

from llava_ds.constants import ConfigError
from llava_ds.extensions.infer.chat import print_note

ADDRESS = "127.0.0.1"
HEAD_S = 10.0  # for a client to send the head of its next request, and what is left of a body after its response
REST_BYTES = 256 << 20  # of such a rest that is read and dropped; closing on unread bytes would take the response away


@contextlib.contextmanager
def listening(port: int) -> Iterator[socket.socket]:
    """Listen on a port of ADDRESS; port 0: any free one. Raises ConfigError where it is taken."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((ADDRESS, port))
        except (OSError, OverflowError) as error:
            raise ConfigError(f"--port {port} can't be used ({error}): give another one") from error
        yield listener


def make_server(app, line: str, on_exit: Callable[[], None] = lambda: None, ending_s: int = 1):
    """A uvicorn.Server, which prints the line once it listens; run(sockets=[...]) returns after SIGINT or SIGTERM.

    on_exit: called at the signal, within the signal's handler; ending_s: seconds that open requests have from then on.
    """
    import uvicorn

    class Server(uvicorn.Server):
        async def startup(self, sockets=None) -> None:
            await super().startup(sockets)
            print_note(f"{line}  (Ctrl-C ends)")

        def handle_exit(self, sig: int, frame: object) -> None:
            # uvicorn's own raises the signal once more at the end, which would end the process in the middle of ours.
            self.force_exit, self.should_exit = self.should_exit, True
            on_exit()

    options = {"log_level": "warning", "server_header": False, "timeout_graceful_shutdown": ending_s}
    return Server(uvicorn.Config(app, http=_impatient(), **options))


def _impatient() -> type[asyncio.Protocol]:
    """uvicorn's HTTP/1.1, which closes connections whose request does not come.

    uvicorn 0.54 has a time limit for a connection that is idle between two requests alone: a new one that sends
    nothing, or a part of a head, and one that goes on with the body of a request that was answered, would stay for
    ever.
    """
    from uvicorn.protocols.http.h11_impl import H11Protocol

    class Impatient(H11Protocol):
        deadline: asyncio.TimerHandle | None = None
        num_dropped = 0

        def connection_made(self, transport) -> None:
            super().connection_made(transport)
            self.watch()

        def data_received(self, data: bytes) -> None:
            if not self.is_answering:
                self.num_dropped += len(data)
            super().data_received(data)
            self.watch()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            self.num_dropped = 0
            self.watch()

        def connection_lost(self, exc: Exception | None) -> None:
            self.stop_watching()
            super().connection_lost(exc)

        def handle_websocket_upgrade(self, event) -> None:
            super().handle_websocket_upgrade(event)
            self.stop_watching()

        @property
        def is_answering(self) -> bool:
            return self.cycle is not None and not self.cycle.response_complete

        def watch(self) -> None:
            if self.is_answering or self.transport.is_closing() or self.transport.get_protocol() is not self:
                self.stop_watching()
            elif self.num_dropped > REST_BYTES:
                self.transport.close()
            elif self.deadline is None:
                self.deadline = self.loop.call_later(HEAD_S, self.transport.close)

        def stop_watching(self) -> None:
            if self.deadline is not None:
                self.deadline.cancel()
                self.deadline = None

    return Impatient
