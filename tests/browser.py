"""A page in headless Chromium, through its debugging pipe: what it asks for, says on its console, and shows."""

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

CHROMIUM = shutil.which("chromium")
OPTIONS = (
    "--headless --no-sandbox --disable-gpu --hide-scrollbars --no-first-run --disable-background-networking "
    "--disable-component-update --disable-extensions --disable-dev-shm-usage --remote-debugging-pipe"
)


class Browser:
    """One tab. requests: the addresses that its page asked for; said: errors and what was written to the console."""

    def __init__(self, commands: int, events: int) -> None:
        self.commands, self.events, self.buffer, self.count = commands, events, b"", 0
        self.requests: list[str] = []
        self.said: list[str] = []
        self.loaded = False
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    session: str | None = None

    def call(self, method: str, **params: object) -> dict:
        self.count += 1
        message = {"id": self.count, "method": method, "params": params}
        if self.session is not None:
            message["sessionId"] = self.session
        os.write(self.commands, json.dumps(message).encode() + b"\0")
        while True:
            answer = self.next_message()
            if answer.get("id") == self.count:
                assert "error" not in answer, answer
                return answer["result"]

    def next_message(self, timeout_s: float = 120.0) -> dict:
        deadline = time.monotonic() + timeout_s
        while b"\0" not in self.buffer:
            ready, _, _ = select.select([self.events], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, "the browser says nothing"
            part = os.read(self.events, 1 << 20)
            assert part, "the browser has ended"
            self.buffer += part
        line, _, self.buffer = self.buffer.partition(b"\0")
        message = json.loads(line)
        method, params = message.get("method"), message.get("params", {})
        if method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method in ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded"):
            self.said.append(json.dumps(params))
        elif method == "Page.loadEventFired":
            self.loaded = True
        return message

    def open(self, path: Path, width: int) -> None:
        """Show a file in a window so many pixels wide, and wait until all of it is loaded."""
        self.requests, self.said, self.loaded = [], [], False
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        self.call("Page.navigate", url=path.resolve().as_uri())
        while not self.loaded:
            self.next_message()

    def ask(self, expression: str):
        """The value of a JavaScript expression in the page."""
        return self.call("Runtime.evaluate", expression=expression, returnByValue=True)["result"].get("value")

    def picture(self, path: Path) -> None:
        """The whole page as a PNG."""
        data = self.call("Page.captureScreenshot", captureBeyondViewport=True)["data"]
        path.write_bytes(base64.b64decode(data))


@contextlib.contextmanager
def browser(profile: Path) -> Iterator[Browser]:
    """A headless Chromium with a profile of its own."""
    its_in, commands = os.pipe()
    events, its_out = os.pipe()
    shell = f'exec "$0" {OPTIONS} "--user-data-dir=$1" 3<&{its_in} 4>&{its_out}'
    process = subprocess.Popen(
        ["bash", "-c", shell, CHROMIUM, str(profile)],
        pass_fds=(its_in, its_out),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(its_in)
    os.close(its_out)
    try:
        yield Browser(commands, events)
    finally:
        process.kill()
        process.wait()
        os.close(commands)
        os.close(events)
