"""A headless Chromium, spoken to over the DevTools protocol: what a page shows and complains of."""

from __future__ import annotations

import asyncio
import base64
import itertools
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp

from tests.integration.loud_skip import skip_loudly

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_START_S = 30.0
_CALL_S = 20.0
_FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
    "--disable-extensions", "--disable-background-networking", "--disable-component-update",
    "--remote-debugging-port=0", "about:blank",
)  # fmt: skip


class BrowserPage:
    """One page of a browser."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.complaints: list[str] = []
        """Console errors and warnings, exceptions, and what the Content-Security-Policy refused."""
        self._socket = socket
        self._session_id = ""
        self._ids = itertools.count(1)
        self._replies: dict[int, asyncio.Future[dict[str, Any]]] = {}

    async def open(self, url: str) -> None:
        """Make the page and go to ``url``."""
        target = await self.call("Target.createTarget", url="about:blank")
        attached = await self.call(
            "Target.attachToTarget", targetId=target["targetId"], flatten=True
        )
        self._session_id = attached["sessionId"]
        for domain in ("Runtime", "Log", "Page"):
            await self.call(f"{domain}.enable")
        await self.call("Page.navigate", url=url)

    async def show(self, width: int, height: int, scheme: str) -> None:
        """Lay out for a window of ``width`` x ``height`` pixels; scheme: ``light`` or ``dark``."""
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=False,
        )  # fmt: skip
        await self.call("Emulation.setScrollbarsHidden", hidden=True)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        await self.call("Emulation.setEmulatedMedia", features=features)
        await self.evaluate("new Promise((done) => requestAnimationFrame(() => setTimeout(done)))")

    async def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression; promises are awaited."""
        reply = await self.call(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in reply, reply["exceptionDetails"]
        return reply["result"].get("value")

    async def until(self, expression: str, timeout_s: float = 15.0) -> None:
        """Poll until ``expression`` is true."""
        async with asyncio.timeout(timeout_s):
            while not await self.evaluate(expression):  # noqa: ASYNC110
                await asyncio.sleep(0.1)

    async def screenshot(self) -> bytes:
        """The whole page as PNG."""
        reply = await self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        return base64.b64decode(reply["data"])

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        """One command of the protocol."""
        number = next(self._ids)
        reply: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._replies[number] = reply
        message: dict[str, Any] = {"id": number, "method": method, "params": params}
        if self._session_id:
            message["sessionId"] = self._session_id
        await self._socket.send_json(message)
        async with asyncio.timeout(_CALL_S):
            return await reply

    async def listen(self) -> None:
        """Take in what the browser says, until it is gone."""
        async for message in self._socket:
            content = message.json()
            if "id" in content:
                assert "error" not in content, content
                self._replies.pop(content["id"]).set_result(content["result"])
            else:
                self._hear(content["method"], content["params"])

    def _hear(self, method: str, params: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            self.complaints.append(str(params["exceptionDetails"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.complaints.append(str(params["entry"]))
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning"):
            self.complaints.append(str(params["args"]))


def find_chromium() -> str:
    """Path of the browser; skips the test, loudly, where there is none."""
    found = next(filter(None, map(shutil.which, _NAMES)), None)
    if found is None:
        reason = "no Chromium is installed (Debian: apt-get install chromium)"
        skip_loudly("the dashboard is", reason)
    return found


@asynccontextmanager
async def browser_page(profile: Path) -> AsyncIterator[BrowserPage]:
    """Start a browser with its profile in ``profile``; it is killed afterwards."""
    process = await asyncio.create_subprocess_exec(
        find_chromium(), f"--user-data-dir={profile}", *_FLAGS,
        stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert process.stderr is not None
    reader: asyncio.Task[bytes] | None = None
    try:
        async with asyncio.timeout(_START_S):
            while not (line := await process.stderr.readline()).startswith(b"DevTools listening"):
                assert line, "the browser ended"
        reader = asyncio.create_task(process.stderr.read())
        url = line.decode().split()[-1]
        async with (
            aiohttp.ClientSession() as session,
            session.ws_connect(url, max_msg_size=64 << 20) as socket,
        ):
            page = BrowserPage(socket)
            listener = asyncio.create_task(page.listen())
            try:
                yield page
            finally:
                listener.cancel()
                with suppress(asyncio.CancelledError):
                    await listener
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        if reader is not None:
            await reader
