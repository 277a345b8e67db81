"""Drives headless Chromium over its DevTools protocol: just enough to use a page as a person does."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import aiohttp

_FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-extensions",
    "--no-first-run", "--remote-debugging-port=0", "--window-size=1200,900", "about:blank",
)  # fmt: skip


class Page:
    """One tab. ``problems`` collects console errors, exceptions and every request for something else than the page."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._number = 0
        self._events: list[dict[str, Any]] = []
        self.problems: list[str] = []

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One command and its answer."""
        self._number += 1
        mine = self._number
        await self._socket.send_str(json.dumps({"id": mine, "method": method, "params": parameters}))
        while True:
            message = json.loads((await self._socket.receive(timeout=60)).data)
            if message.get("id") == mine:
                assert "error" not in message, message
                return message["result"]
            self._take(message)

    def _take(self, message: dict[str, Any]) -> None:
        self._events.append(message)
        method, said = message.get("method"), message.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.problems.append(str(said["exceptionDetails"])[:300])
        elif method == "Log.entryAdded" and said["entry"]["level"] in ("error", "warning"):
            self.problems.append(said["entry"]["text"])
        elif method == "Runtime.consoleAPICalled" and said["type"] in ("error", "warning"):
            self.problems.append(str(said["args"])[:300])
        elif method == "Network.requestWillBeSent" and not said["request"]["url"].startswith(
            ("file:", "data:")
        ):
            self.problems.append("asked for " + said["request"]["url"])

    async def open(self, path: Path) -> None:
        """Load a file and wait until it is loaded."""
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self.call(f"{domain}.enable")
        await self.call("Page.navigate", url=path.as_uri())
        while not any(event.get("method") == "Page.loadEventFired" for event in self._events):
            self._take(json.loads((await self._socket.receive(timeout=60)).data))

    async def js(self, expression: str) -> Any:
        """The value of an expression in the page."""
        answer = await self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    async def box(self, selector: str) -> tuple[float, float, float, float]:
        """Left, top, width and height of an element, scrolled into view."""
        found = await self.js(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)}); e.scrollIntoView({{block: 'center'}});"
            "const b = e.getBoundingClientRect(); return [b.left, b.top, b.width, b.height]; })()"
        )
        return tuple(found)

    async def mouse(self, kind: str, x: float, y: float) -> None:
        """Move, press or release the left button."""
        await self.call(
            "Input.dispatchMouseEvent", type=kind, x=x, y=y, button="none" if kind == "mouseMoved" else "left", clickCount=1,
            buttons=0 if kind == "mouseReleased" else 1,
        )  # fmt: skip

    async def key(self, name: str) -> None:
        """Press a key."""
        await self.call(
            "Input.dispatchKeyEvent", type="keyDown", key=name, text=name if len(name) == 1 else ""
        )
        await self.call("Input.dispatchKeyEvent", type="keyUp", key=name)


class Browser:
    """``async with Browser(folder) as page``."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    async def __aenter__(self) -> Page:
        self._process = subprocess.Popen(
            ["chromium", f"--user-data-dir={self._folder / 'profile'}", *_FLAGS],
            stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True,
        )  # fmt: skip
        assert self._process.stderr is not None
        for line in self._process.stderr:
            port = re.search(r"DevTools listening on ws://127\.0\.0\.1:(\d+)/", line)
            if port:
                break
        else:
            raise AssertionError("chromium did not start; install it with: make system")
        self._session = aiohttp.ClientSession()
        async with self._session.get(f"http://127.0.0.1:{port.group(1)}/json/list") as answer:
            tab = next(one for one in await answer.json() if one["type"] == "page")
        self._socket = await self._session.ws_connect(tab["webSocketDebuggerUrl"], max_msg_size=0)
        return Page(self._socket)

    async def __aexit__(self, *_: object) -> None:
        await self._socket.close()
        await self._session.close()
        self._process.terminate()
        self._process.communicate(timeout=60)
