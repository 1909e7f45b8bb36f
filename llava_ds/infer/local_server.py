"""A server that only this machine reaches: its socket, and uvicorn around an application."""

import contextlib
import socket
from collections.abc import Callable, Iterator

from llava_ds.constants import ConfigError
from llava_ds.infer.chat import print_note

ADDRESS = "127.0.0.1"


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
    return Server(uvicorn.Config(app, **options))
