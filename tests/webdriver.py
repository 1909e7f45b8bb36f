"""A page in headless Chromium, through chromedriver: the W3C's WebDriver protocol, without a package for it."""

import json
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

from llava_ds.launchers import free_port

FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage", "about:blank",
)  # fmt: skip
_ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # the protocol's name for an element's reference


def missing() -> str | None:
    """What is not installed of what a browser needs; None when all is there."""
    names = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
    return f"{' and '.join(names)} not installed (Debian: chromium, chromium-driver)" if names else None


class Browser:
    """One window of so many pixels' width. To be closed: use it in a with block."""

    def __init__(self, profile: Path, width: int = 1400, height: int = 1000) -> None:
        port = free_port()
        self._driver = subprocess.Popen(["chromedriver", f"--port={port}"], stdout=subprocess.DEVNULL)
        self._base = f"http://127.0.0.1:{port}"
        options = {
            "binary": shutil.which("chromium"),
            "args": [f"--user-data-dir={profile}", f"--window-size={width},{height}", *FLAGS],
        }
        wanted = {
            "goog:chromeOptions": options,
            "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"},
        }
        try:
            self.until(self._is_ready, 60)
            answer = self._call("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
        except BaseException:
            self._driver.kill()
            raise
        self._base += f"/session/{answer['sessionId']}"

    def __enter__(self) -> "Browser":
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._call("DELETE", "")
        finally:
            self._driver.terminate()
            self._driver.wait()

    def open(self, url: str) -> None:
        self._call("POST", "/url", {"url": url})

    def all(self, selector: str) -> list[str]:
        """References of the elements that a CSS selector finds."""
        found = self._call("POST", "/elements", {"using": "css selector", "value": selector})
        return [element[_ELEMENT] for element in found]

    def texts(self, selector: str) -> list[str]:
        """What is to be read in the elements that a CSS selector finds, all at one moment."""
        return self.run("return [...document.querySelectorAll(arguments[0])].map(e => e.innerText)", selector)

    def type(self, element: str, text: str) -> None:
        """Press keys in an element; for a file input, name the files."""
        self._call("POST", f"/element/{element}/value", {"text": text})

    def run(self, script: str, *arguments: object) -> object:
        """What a script of the page's returns."""
        return self._call("POST", "/execute/sync", {"script": script, "args": list(arguments)})

    def screenshot(self, path: Path) -> None:
        import base64

        path.write_bytes(base64.b64decode(self._call("GET", "/screenshot")))

    def requested(self) -> list[str]:
        """Addresses of all that the page asked for since the last call, whether it was let through or not."""
        events = [json.loads(entry["message"])["message"] for entry in self._log("performance")]
        urls = [e["params"]["request"]["url"] for e in events if e["method"] == "Network.requestWillBeSent"]
        return [url for url in urls if not url.startswith(("chrome:", "chrome-untrusted:", "about:"))]  # the browser's

    def console(self) -> list[str]:
        """Errors in the console since the last call."""
        return [entry["message"] for entry in self._log("browser") if entry["level"] == "SEVERE"]

    def until(self, found: Callable[[], object], timeout_s: float = 120) -> object:
        """The first thing that is found; TimeoutError where there is none in time."""
        deadline = time.monotonic() + timeout_s
        while not (value := found()):
            if time.monotonic() > deadline:
                raise TimeoutError(f"nothing came of {found}")
            time.sleep(0.2)
        return value

    def _log(self, kind: str) -> list[dict]:
        return self._call("POST", "/se/log", {"type": kind})

    def _is_ready(self) -> bool:
        try:
            return self._call("GET", "/status")["ready"]
        except (urllib.error.URLError, ConnectionError):
            return False

    def _call(self, method: str, path: str, body: dict | None = None):
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._base + path, data, {"Content-Type": "application/json"}, method=method)
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                return json.loads(answer.read())["value"]
        except urllib.error.HTTPError as error:
            raise RuntimeError(f"{method} {path}: {error.read().decode()[:500]}") from error
