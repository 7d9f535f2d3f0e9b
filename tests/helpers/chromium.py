"""A headless Chromium without a network, driven through the pipes of its DevTools protocol."""

import base64
import json
import os
import shutil
import subprocess
import time
from contextlib import contextmanager
from itertools import count
from tempfile import TemporaryDirectory

PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-pipe")
FLAGS += ("--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",)


class Page:
    """One tab. `problems` are errors and warnings of its console, `requests` the addresses that it asked for."""

    def __init__(self, to_browser, from_browser):
        self._to, self._from, self._numbers, self._rest = to_browser, from_browser, count(1), b""
        self._session, self.problems, self.requests = None, [], []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method, **params):
        """The result of a DevTools command."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": params}
        message |= {"sessionId": self._session} if self._session else {}
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == number:
                assert "error" not in answer, answer
                return answer["result"]

    def _read(self):
        while b"\0" not in self._rest:
            block = os.read(self._from, 1 << 20)
            assert block, "Chromium has ended"
            self._rest += block
        message, self._rest = self._rest.split(b"\0", 1)
        event = json.loads(message)
        params, method = event.get("params", {}), event.get("method")
        if method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.problems.append(params["entry"]["text"])
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning"):
            self.problems.append(str(params["args"]))
        elif method == "Runtime.exceptionThrown":
            self.problems.append(str(params["exceptionDetails"]))
        elif method == "Network.requestWillBeSent" and not params["request"]["url"].startswith(("data:", "blob:")):
            self.requests.append(params["request"]["url"])
        return event

    def open(self, url, width=1100, height=900, dark=False):
        """Load a page in a window of this size (pixels) and wait for it."""
        theme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=theme)
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        self.call("Page.navigate", url=url)
        self.until("location.href != 'about:blank' && document.readyState == 'complete'")

    def eval(self, expression):
        """The value of a JavaScript expression."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def until(self, expression, seconds=20):
        """Wait until an expression is true."""
        end = time.monotonic() + seconds
        while not self.eval(expression):
            assert time.monotonic() < end, expression
            time.sleep(0.05)

    def drag(self, selector, start, end):
        """Drag the mouse over an element, from one share of its width to another, at half of its height."""
        box = f"document.querySelector({json.dumps(selector)}).getBoundingClientRect()"
        x, y, width, height = self.eval(f"(({{x, y, width, height}}) => [x, y, width, height])({box})")
        points = [(x + width * (start + (end - start) * i / 5), y + height / 2) for i in range(6)]
        for kind, at in (("mousePressed", points[:1]), ("mouseMoved", points), ("mouseReleased", points[-1:])):
            for x, y in at:
                where = {"x": x, "y": y, "button": "left", "buttons": 1, "clickCount": 1}
                self.call("Input.dispatchMouseEvent", type=kind, **where)

    def picture(self, path):
        """Write a PNG file of the whole page."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        shot = self.call("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))


@contextmanager
def opened_browser():
    """A page of a new Chromium in which no host name can be resolved."""
    theirs_in, ours_out = os.pipe()
    ours_in, theirs_out = os.pipe()
    with TemporaryDirectory(ignore_cleanup_errors=True) as profile:  # its last processes may still write

        def connect():  # the browser reads from descriptor 3 and writes to 4
            os.dup2(os.dup2(theirs_in, 10), 3)
            os.dup2(os.dup2(theirs_out, 11), 4)

        args = [PROGRAM, *FLAGS, f"--user-data-dir={profile}"]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        browser = subprocess.Popen(args, preexec_fn=connect, close_fds=False, **quiet)
        os.close(theirs_in)
        os.close(theirs_out)
        try:
            yield Page(ours_out, ours_in)
        finally:
            browser.terminate()
            browser.wait(20)
            os.close(ours_in)
            os.close(ours_out)
