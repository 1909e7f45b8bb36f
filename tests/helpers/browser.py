"""A page in headless Chromium, through its debugging pipe: its requests, its console and its content."""

import base64
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Callable, Iterable
from pathlib import Path

CHROMIUM = shutil.which("chromium")
OPTIONS = (
    "--headless=new --no-sandbox --disable-gpu --hide-scrollbars --no-first-run --disable-background-networking "
    "--disable-component-update --disable-extensions --disable-sync --disable-quic --disable-dev-shm-usage "
    "--remote-debugging-pipe"
)
WHOLE_PAGE = 16_000  # pixels of height, at most: longer images Chromium does not take
ENTER = {"key": "Enter", "code": "Enter", "windowsVirtualKeyCode": 13, "text": "\r"}

# Every piece of text against the window and every box around it that clips or scrolls; then labels within each chart.
CUT_TEXTS = """(() => {
  const cut = [], wide = document.documentElement.clientWidth, slack = 1.5;
  const name = (text, why) => cut.push(why + ': ' + text.trim().slice(0, 80));
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    const node = texts.currentNode, parent = node.parentElement;
    if (!node.data.trim() || !parent.checkVisibility({contentVisibilityAuto: true})) continue;
    if (parent.closest('style, script, title, svg title')) continue;
    const range = document.createRange();
    range.selectNodeContents(node);
    for (const box of range.getClientRects()) {
      if (!box.width) continue;
      if (box.left < -slack || box.right > wide + slack) { name(node.data, 'outside the window'); break; }
      const around = [];
      for (let e = parent; e && e !== document.body; e = e.parentElement)
        if (e.tagName === 'svg' || getComputedStyle(e).overflowX !== 'visible') around.push(e.getBoundingClientRect());
      if (around.some(r => box.left < r.left - slack || box.right > r.right + slack
                        || box.top < r.top - 3 || box.bottom > r.bottom + 3)) { name(node.data, 'clipped'); break; }
    }
  }
  for (const svg of document.querySelectorAll('svg')) {
    const boxes = [...svg.querySelectorAll('text')].map(t => [t.textContent, t.getBoundingClientRect()]);
    boxes.forEach(([a, p], i) => boxes.slice(i + 1).forEach(([b, q]) => {
      if (p.left < q.right - 1 && q.left < p.right - 1 && p.top < q.bottom - 4 && q.top < p.bottom - 4)
        name(a + ' / ' + b, 'on each other');
    }));
  }
  return cut;
})()"""


def missing() -> str | None:
    """The first requirement of a browser that is not installed; None if all are."""
    return "chromium not found: apt-get install chromium" if CHROMIUM is None else None


class Browser:
    """One tab; a with block closes it.

    requests: addresses requested by the page, its frames and its workers, allowed or blocked; errors: the console's
    errors.
    """

    def __init__(self, profile: Path) -> None:
        """profile: a folder of its own."""
        its_in, self._commands = os.pipe()
        self._events, its_out = os.pipe()
        shell = f'exec "$0" {OPTIONS} "--user-data-dir=$1" 3<&{its_in} 4>&{its_out}'
        self._process = subprocess.Popen(
            ["bash", "-c", shell, CHROMIUM, str(profile)],
            pass_fds=(its_in, its_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(its_in)
        os.close(its_out)
        self._buffer, self._count, self._session = b"", 0, None
        self.requests: list[str] = []
        self.errors: list[str] = []
        self._loaded = False
        try:
            target = self._call("Target.createTarget", url="about:blank")["targetId"]
            self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
            for domain in ("Page", "Network", "Runtime", "Log", "DOM"):
                self._call(f"{domain}.enable")
            self._call("Target.setAutoAttach", autoAttach=True, waitForDebuggerOnStart=True, flatten=True)
        except BaseException:
            self._close()
            raise

    def __enter__(self) -> "Browser":
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def open(self, address: str | Path, width: int = 1400, height: int = 900) -> None:
        """Show an address or a file in a window of so many pixels, and wait until all of it is loaded."""
        self.requests, self.errors, self._loaded = [], [], False
        self.resize(width, height)
        url = address.resolve().as_uri() if isinstance(address, Path) else address
        answer = self._call("Page.navigate", url=url)
        assert "errorText" not in answer, answer
        while not self._loaded:
            self._next_message()

    def resize(self, width: int, height: int = 900) -> None:
        """Make the window so many pixels large."""
        self._call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def ask(self, expression: str):
        """The value of a JavaScript expression in the page."""
        answer = self._call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def count(self, selector: str) -> int:
        """The number of elements that a CSS selector finds."""
        return self.ask(f"document.querySelectorAll({json.dumps(selector)}).length")

    def texts(self, selector: str) -> list[str]:
        """The texts of the elements that a CSS selector finds, all at one moment."""
        return self.ask(f"[...document.querySelectorAll({json.dumps(selector)})].map(e => e.innerText)")

    def broken_images(self) -> list[str]:
        """Addresses of the page's images that are not shown."""
        return self.ask(
            "[...document.images].filter(i => !i.complete || !i.naturalWidth).map(i => i.src.slice(0, 200))"
        )

    def type(self, selector: str, text: str) -> None:
        """Write into the first element that a CSS selector finds, and press Enter."""
        self.ask(f"document.querySelector({json.dumps(selector)}).focus()")
        self._call("Input.insertText", text=text)
        for kind in ("keyDown", "keyUp"):
            self._call("Input.dispatchKeyEvent", type=kind, **ENTER)

    def upload(self, selector: str, files: Iterable[Path]) -> None:
        """Choose files in the first input that a CSS selector finds, replacing earlier choices."""
        root = self._call("DOM.getDocument")["root"]["nodeId"]
        node = self._call("DOM.querySelector", nodeId=root, selector=selector)["nodeId"]
        self._call("DOM.setFileInputFiles", nodeId=node, files=[str(file) for file in files])

    def until(self, found: Callable[[], object], timeout_s: float = 120) -> object:
        """Return the first match. Raises TimeoutError if nothing matches in time."""
        deadline = time.monotonic() + timeout_s
        while not (value := found()):
            if time.monotonic() > deadline:
                raise TimeoutError(f"nothing came of {found}")
            time.sleep(0.2)
        return value

    def cut_texts(self) -> list[str]:
        """List unreadable texts: outside the window or clipped, and chart labels that overlap."""
        return self.ask(CUT_TEXTS)

    def screenshot(self, path: Path) -> None:
        """The whole page as a PNG, as wide as the window."""
        size = self._call("Page.getLayoutMetrics")
        width, height = size["cssLayoutViewport"]["clientWidth"], min(size["cssContentSize"]["height"], WHOLE_PAGE)
        clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
        data = self._call("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)["data"]
        path.write_bytes(base64.b64decode(data))

    def _call(self, method: str, **params: object) -> dict:
        number = self._send(method, self._session, params)
        while (answer := self._next_message()).get("id") != number:
            pass
        assert "error" not in answer, answer
        return answer["result"]

    def _send(self, method: str, session: str | None, params: dict[str, object]) -> int:
        self._count += 1
        message = {"id": self._count, "method": method, "params": params}
        if session is not None:
            message["sessionId"] = session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._commands, data) :]
        return self._count

    def _next_message(self, timeout_s: float = 120.0) -> dict:
        deadline = time.monotonic() + timeout_s
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._events], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, "the browser says nothing"
            part = os.read(self._events, 1 << 20)
            assert part, "the browser has ended"
            self._buffer += part
        line, _, self._buffer = self._buffer.partition(b"\0")
        message = json.loads(line)
        self._take(message.get("method"), message.get("params", {}))
        return message

    def _take(self, event: str | None, params: dict) -> None:
        if event == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif event == "Network.webSocketCreated":
            self.requests.append(params["url"])
        elif (
            event == "Runtime.exceptionThrown"
            or (event == "Runtime.consoleAPICalled" and params["type"] in ("error", "assert"))
            or (event == "Log.entryAdded" and params["entry"]["level"] == "error")
        ):
            self.errors.append(json.dumps(params))
        elif event == "Page.loadEventFired":
            self._loaded = True
        elif event == "Target.attachedToTarget" and self._session is not None:  # a frame or a worker; it waits
            for method in ("Network.enable", "Runtime.enable", "Runtime.runIfWaitingForDebugger"):
                self._send(method, params["sessionId"], {})

    def _close(self) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._commands)
        os.close(self._events)
