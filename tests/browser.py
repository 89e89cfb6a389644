"""A headless browser that is told what to do: opens pages, runs scripts in them, takes pictures."""

import base64
import json
import subprocess
import time
from contextlib import ExitStack
from pathlib import Path


class Browser:
    """Chromium without a window. What it logs, and every address it asks for, is kept."""

    def __init__(self, program, folder):
        from websockets.sync.client import connect

        self._process = subprocess.Popen(
            [
                *(program, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"),
                *("--remote-debugging-port=0", f"--user-data-dir={folder}", "about:blank"),
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        place, limit = Path(folder, "DevToolsActivePort"), time.monotonic() + 60
        while not (place.exists() and len(place.read_text().split()) == 2):
            assert time.monotonic() < limit, "the browser does not start"
            time.sleep(0.1)
        port, path = place.read_text().split()
        self._open = ExitStack()
        self._open.callback(self._end)
        self._socket = self._open.enter_context(
            connect(f"ws://127.0.0.1:{port}{path}", max_size=None)
        )
        self._number, self._session = 0, None
        self.logged, self.asked, self.dialogs = [], [], []
        target = self.tell("Target.createTarget", url="about:blank")["targetId"]
        attached = self.tell("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for part in ("Page", "Runtime", "Log", "Network"):
            self.tell(f"{part}.enable")

    def tell(self, method, **how):
        """Send a command and return its answer."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": how}
        if self._session is not None:
            message["sessionId"] = self._session
        self._socket.send(json.dumps(message))
        while True:
            answer = json.loads(self._socket.recv(timeout=120))
            self._hear(answer)
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]

    def _hear(self, answer):
        told = answer.get("params", {})
        name = answer.get("method", "")
        if name == "Log.entryAdded":
            self.logged.append(told["entry"]["text"])
        elif name in ("Runtime.exceptionThrown", "Runtime.consoleAPICalled"):
            self.logged.append(json.dumps(told)[:500])
        elif name == "Network.requestWillBeSent":
            self.asked.append(told["request"]["url"])
        elif name == "Page.javascriptDialogOpening":
            self.dialogs.append(told["message"])

    def open(self, address):
        """Load a page and wait until it is there."""
        self.tell("Page.navigate", url=address)
        limit = time.monotonic() + 60
        while self.run("document.readyState + location.href") != f"complete{address}":
            assert time.monotonic() < limit, address
            time.sleep(0.1)

    def run(self, script):
        """Return what an expression is in the page."""
        answer = self.tell(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def look_like(self, *, width, height, dark=False, scale=1):
        """Be a window of some size, in the light or in the dark."""
        self.tell(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=scale,
            mobile=width < 600,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.tell("Emulation.setEmulatedMedia", features=[scheme])

    def picture(self):
        """Return what is seen, as PNG."""
        return base64.b64decode(self.tell("Page.captureScreenshot", format="png")["data"])

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._open.close()

    def _end(self):
        self._process.terminate()
        self._process.wait(30)
