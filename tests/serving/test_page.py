"""The page, in a headless Chromium that is told what to do over its DevTools protocol: a streamed answer, a stop, likely tokens."""

import asyncio
import base64
import json
import os
import shutil
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import pytest
import torch

from tests.nn.models import config, redrawn
from tests.serving.conftest import Serve

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
FLAGS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--window-size=1000,760", "--remote-debugging-port=0"),
]
pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="no chromium")]


class Browser:
    """One tab. Screenshots go to the folder that LM_SCREENSHOTS names, where it is set."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket, self._count = socket, 0

    async def ask(self, method: str, **params: Any) -> dict[str, Any]:
        self._count += 1
        await self._socket.send_str(json.dumps({"id": self._count, "method": method, "params": params}))
        while (answer := json.loads((await self._socket.receive()).data)).get("id") != self._count:
            pass
        assert "error" not in answer, answer
        return dict(answer["result"])

    async def run(self, script: str) -> Any:
        found = await self.ask("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    async def until(self, script: str) -> None:
        for _ in range(600):
            if await self.run(script):
                return
            await asyncio.sleep(0.05)
        raise AssertionError(f"never: {script}: {await self.run('document.body.innerText')}")

    async def shot(self, name: str) -> None:
        if folder := os.environ.get("LM_SCREENSHOTS"):
            data = (await self.ask("Page.captureScreenshot", format="png"))["data"]
            Path(folder, f"{name}.png").write_bytes(base64.b64decode(data))


@asynccontextmanager
async def browsing(url: str, profile: Path) -> AsyncIterator[Browser]:
    assert CHROMIUM is not None
    with subprocess.Popen(
        [CHROMIUM, *FLAGS, f"--user-data-dir={profile}", url], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as tab:
        try:
            while not (port := profile / "DevToolsActivePort").is_file() or not port.read_text():
                await asyncio.sleep(0.05)
            async with aiohttp.ClientSession() as session:
                found: list[dict[str, Any]] = []
                while not found:
                    async with session.get(f"http://127.0.0.1:{port.read_text().split()[0]}/json/list") as answer:
                        found = [page for page in await answer.json() if page["type"] == "page" and page["url"].startswith(url)]
                async with session.ws_connect(found[0]["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                    yield Browser(socket)
        finally:
            tab.kill()


@pytest.fixture
def client(serve: Serve) -> Iterator[httpx.Client]:
    """Of a model that writes letters and never ends."""
    model = redrawn(config(vocab_size=320, max_seq_len=256, head={"tied": False, "bias": True}))
    with torch.no_grad():
        model.head.bias.fill_(-100)
        model.head.bias[32:127] = 0
    with serve(model) as found:
        yield found


def test_the_page_streams_stops_and_shows_likely_tokens(client: httpx.Client, tmp_path: Path) -> None:
    async def visit() -> None:
        async with browsing(str(client.base_url), tmp_path) as browser:
            await browser.until("document.title === 'tiny'")
            say = "document.getElementById('text').value = '{}'; document.getElementById('go').click();"
            await browser.run("document.getElementById('most').value = 300;" + say.format("What is a norm?"))
            button = "document.getElementById('go').innerText"
            await browser.until(f"document.querySelectorAll('.assistant span').length > 3 && {button} === 'Stop'")
            await browser.until(f"{button} === 'Send'")
            assert "tokens/s" in await browser.run("document.querySelector('.assistant small').innerText")
            at = await browser.run("(r => [r.x + 2, r.y + 5])(document.querySelector('.assistant span').getBoundingClientRect())")
            await browser.ask("Input.dispatchMouseEvent", type="mouseMoved", x=at[0], y=at[1])
            await browser.until("getComputedStyle(document.getElementById('likely')).display === 'block'")
            assert await browser.run("document.querySelectorAll('#likely div').length") in (5, 6)
            await browser.shot("light")
            await browser.ask("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark"}])
            await browser.shot("dark")
            await browser.run("document.getElementById('most').value = 3000;" + say.format("More!"))
            await browser.until("document.querySelectorAll('.assistant')[1]?.querySelectorAll('span').length > 3")
            await browser.run("document.getElementById('go').click()")
            await browser.until("document.querySelectorAll('.assistant small')[1].innerText.endsWith('stopped')")
            await browser.shot("stopped")

    asyncio.run(visit())
    began = time.monotonic()
    while "lm_rows_running 0" not in client.get("/metrics").text:  # the server has noticed
        assert time.monotonic() - began < 20
