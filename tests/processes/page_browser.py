"""A headless Chromium driven over its debugging pipe: as a person with mouse and keyboard. Not a
test.

Scripts of pages are switched off in it; only `submit` runs one, as an attacker's page would.
"""

import base64
import itertools
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from tests.patience import HUNG_S, until

# Where `bin/debian chromium` has unpacked it, for a machine without one; bin/prove night does that.
_CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kclrun" / "chromium"
CHROMIUM = (
    shutil.which("chromium")
    or shutil.which("chromium-browser")
    or shutil.which("chrome")
    or shutil.which("chromium", path=_CACHE / "usr" / "lib" / "chromium")
)
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on this machine")


def browser(profile, *arguments):
    """The headless browser; without its sandbox, and with the little shared memory that a container
    has. One that was only unpacked has its libraries beside it."""
    beside = [] if Path(CHROMIUM).is_relative_to("/usr") else _CACHE.glob("usr/lib/*-linux-gnu")
    return [
        "env",
        *(f"LD_LIBRARY_PATH={each}" for each in beside),
        CHROMIUM,
        "--disable-dev-shm-usage",
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--no-first-run",
        f"--user-data-dir={profile}",
        *arguments,
    ]


class Browser:
    """One tab."""

    def __init__(self, command, *, with_scripts=False):
        to_it, our_in = os.pipe()
        our_out, from_it = os.pipe()

        # Chromium reads its commands from 3 and writes its answers to 4.
        placed = f'exec "$0" "$@" 3<&{to_it} 4>&{from_it}'
        self._process = subprocess.Popen(
            ["bash", "-c", placed, *command, "--remote-debugging-pipe", "about:blank"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(to_it, from_it),
        )
        os.close(to_it)
        os.close(from_it)
        self._in, self._out = our_in, our_out
        self._received, self._numbers, self._session = b"", itertools.count(1), None
        attached = self._call("Target.attachToTarget", targetId=self._tab(), flatten=True)
        self._session = attached["sessionId"]
        self._call("Page.enable")
        self._call("Emulation.setScriptExecutionDisabled", value=not with_scripts)

    def close(self):
        self._process.terminate()
        self._process.wait(HUNG_S)
        os.close(self._in)
        os.close(self._out)

    def _tab(self):
        """The first tab; a browser on a busy machine answers before it has one."""

        def tabs():
            found = self._call("Target.getTargets")["targetInfos"]
            return [each["targetId"] for each in found if each["type"] == "page"]

        return until(tabs, why=lambda: "the browser opens no tab")[0]

    def open(self, url):
        self._loading("Page.navigate", url=url)

    def type(self, selector, text):
        self._call("DOM.focus", nodeId=self._node(selector))
        self._call("Input.insertText", text=text)

    def press_enter(self):
        key = {"key": "Enter", "code": "Enter", "windowsVirtualKeyCode": 13, "text": "\r"}
        self._loading("Input.dispatchKeyEvent", type="keyDown", **key)

    def click(self, selector):
        node = self._node(selector)
        self._call("DOM.scrollIntoViewIfNeeded", nodeId=node)
        corners = self._call("DOM.getContentQuads", nodeId=node)["quads"][0]
        x, y = sum(corners[::2]) / 4, sum(corners[1::2]) / 4
        at = {"x": x, "y": y, "button": "left", "clickCount": 1}
        self._call("Input.dispatchMouseEvent", type="mousePressed", **at)
        self._loading("Input.dispatchMouseEvent", type="mouseReleased", **at)

    def submit(self):
        """The first form of the page, by a script."""
        self._loading("Runtime.evaluate", expression="document.forms[0].submit()")

    def value(self, expression):
        """What a script of a debugger would see; the page's own ones may be off."""
        found = self._call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def until(self, expression):
        """Wait until it is true in the page."""
        until(lambda: self.value(expression), why=lambda: f"never {expression}: {self.html()}")

    def html(self):
        root = self._call("DOM.getDocument", depth=0)["root"]["nodeId"]
        return self._call("DOM.getOuterHTML", nodeId=root)["outerHTML"]

    def size(self, width, height):
        self._call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )

    def prefer(self, scheme):
        """`light` or `dark`, as the person has set it."""
        wanted = {"name": "prefers-color-scheme", "value": scheme}
        self._call("Emulation.setEmulatedMedia", features=[wanted])

    def picture(self, path, width=1200, height=900):
        self.size(width, height)
        path.write_bytes(base64.b64decode(self._call("Page.captureScreenshot")["data"]))

    def _node(self, selector):
        root = self._call("DOM.getDocument", depth=0)["root"]["nodeId"]
        node = self._call("DOM.querySelector", nodeId=root, selector=selector)["nodeId"]
        assert node, f"no {selector} in {self.html()}"
        return node

    def _loading(self, method, **parameters):
        """A call after which another page is loaded."""
        number = self._send(method, parameters)
        self._until(lambda message: message.get("method") == "Page.loadEventFired", number)

    def _call(self, method, **parameters):
        number = self._send(method, parameters)
        return self._until(lambda message: message.get("id") == number, number)["result"]

    def _send(self, method, parameters):
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._in, json.dumps(message).encode() + b"\0")
        return number

    def _until(self, is_it, number):
        deadline = time.monotonic() + HUNG_S
        while True:
            while b"\0" not in self._received:
                left_s = deadline - time.monotonic()
                assert left_s > 0, "the browser does not answer"
                if select.select([self._out], [], [], left_s)[0]:
                    piece = os.read(self._out, 1 << 20)
                    assert piece, "the browser has ended"
                    self._received += piece
            text, _, self._received = self._received.partition(b"\0")
            message = json.loads(text)
            assert message.get("id") != number or "error" not in message, message
            if is_it(message):
                return message
