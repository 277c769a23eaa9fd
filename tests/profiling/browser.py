"""Drives a headless Chromium over its debugging pipe: JSON messages that end in a zero byte."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


class Browser:
    """One page of one browser; a context manager."""

    def __init__(self, width: int = 1280, height: int = 900) -> None:
        self._folder = tempfile.mkdtemp(prefix="browser")
        # Chromium reads commands from descriptor 3 and answers on descriptor 4.
        read_command, self._write = os.pipe()
        self._read, write_answer = os.pipe()
        script = f'exec 3<&{read_command} 4>&{write_answer}; exec "$0" "$@"'
        command = [
            CHROMIUM,
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--remote-debugging-pipe",
            f"--user-data-dir={self._folder}",
            f"--window-size={width},{height}",
            "about:blank",
        ]
        self._process = subprocess.Popen(
            ["bash", "-c", script, *command],
            pass_fds=(read_command, write_answer),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(read_command)
        os.close(write_answer)
        self._pending = b""
        self._number = 0
        self.errors: list[str] = []
        self.requests: list[str] = []
        self._session: str | None = None
        target = self._page()
        answer = self.send("Target.attachToTarget", targetId=target, flatten=True)
        self._session = answer["sessionId"]
        for domain in ("Page", "Runtime", "Network"):
            self.send(f"{domain}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *exception: object) -> None:
        self._process.terminate()
        self._process.wait(timeout=20)
        os.close(self._write)
        os.close(self._read)
        shutil.rmtree(self._folder, ignore_errors=True)

    def open(self, url: str) -> None:
        """Goes to a page and waits until it is loaded."""
        self.send("Page.navigate", url=url)
        self.wait_for("document.readyState === 'complete' && location.href !== 'about:blank'")

    def evaluate(self, script: str) -> Any:
        """The value of a JavaScript expression."""
        options = {"returnByValue": True, "awaitPromise": True}
        answer = self.send("Runtime.evaluate", expression=script, **options)
        if "exceptionDetails" in answer:
            raise RuntimeError(answer["exceptionDetails"]["exception"].get("description"))
        return answer["result"].get("value")

    def wait_for(self, script: str, seconds: float = 60) -> Any:
        """The expression's value as soon as it is true."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            try:
                value = self.evaluate(script)
            except RuntimeError:
                value = None
            if value:
                return value
            time.sleep(0.2)
        raise TimeoutError(f"never true: {script}")

    def move_to(self, x: float, y: float) -> None:
        """Moves the pointer."""
        self.send("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def emulate(self, scheme: str, vision: str = "none") -> None:
        """Prefers "light" or "dark"; `vision` "achromatopsia" shows everything in grey."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.send("Emulation.setEmulatedMedia", features=features)
        self.send("Emulation.setEmulatedVisionDeficiency", type=vision)

    def screenshot(self, path: object, whole: bool = False) -> None:
        """Saves a PNG of the window, or of the whole page."""
        answer = self.send("Page.captureScreenshot", captureBeyondViewport=whole)
        with open(str(path), "wb") as stream:
            stream.write(base64.b64decode(answer["data"]))

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """Sends a command and returns its answer; events that pass by are noted."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]
            self._note(answer)

    def _page(self) -> str:
        for _ in range(100):
            for target in self.send("Target.getTargets")["targetInfos"]:
                if target["type"] == "page":
                    return target["targetId"]
            time.sleep(0.1)
        raise TimeoutError("Chromium opened no page")

    def _note(self, event: dict[str, Any]) -> None:
        params = event.get("params", {})
        if event.get("method") == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(params["exceptionDetails"])[:500])
        elif event.get("method") == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._pending:
            if not select.select([self._read], [], [], 60)[0]:
                raise TimeoutError("Chromium does not answer")
            chunk = os.read(self._read, 1 << 16)
            if not chunk:
                raise EOFError("Chromium ended")
            self._pending += chunk
        message, self._pending = self._pending.split(b"\0", 1)
        return json.loads(message)
