"""Run an application with uvicorn on a socket that only this machine can reach."""

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterator

from llava_ds.constants import ConfigError
from llava_ds.extensions.infer.chat import print_note

ADDRESS = "127.0.0.1"
HEAD_S = 10.0  # seconds for a client to send its next request's head, and the rest of a body after the response
REST_BYTES = 256 << 20  # read and discard at most this rest, because closing with unread bytes loses the response


@contextlib.contextmanager
def listening(port: int) -> Iterator[socket.socket]:
    """Listen on a port of ADDRESS, or on any free port if it is 0. Raises ConfigError if the port is taken."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((ADDRESS, port))
        except (OSError, OverflowError) as error:
            raise ConfigError(f"--port {port} can't be used ({error}): give another one") from error
        yield listener


def make_server(app, line: str, on_exit: Callable[[], None] = lambda: None, ending_s: int = 1):
    """Return a uvicorn.Server that prints `line` when it listens. run(sockets=[...]) returns after SIGINT or SIGTERM.

    on_exit: called in the signal handler; ending_s: seconds after the signal for open requests to finish.
    """
    import uvicorn

    class Server(uvicorn.Server):
        async def startup(self, sockets=None) -> None:
            await super().startup(sockets)
            print_note(f"{line}  (Ctrl-C ends)")

        def handle_exit(self, sig: int, frame: object) -> None:
            # uvicorn's own handler raises the signal again at the end, and would kill the process during cleanup.
            self.force_exit, self.should_exit = self.should_exit, True
            on_exit()

    options = {"log_level": "warning", "server_header": False, "timeout_graceful_shutdown": ending_s}
    return Server(uvicorn.Config(app, http=_impatient(), **options))


def _impatient() -> type[asyncio.Protocol]:
    """Return uvicorn's HTTP/1.1 protocol, changed to close connections whose request does not arrive.

    uvicorn 0.54 limits only the idle time between two requests. It would keep forever a new connection that sends
    nothing or part of a head, and one that keeps sending the body of an answered request.
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
