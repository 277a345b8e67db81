"""The page in a real browser: hover, zoom, filter, keyboard; no console error, nothing loaded."""

from __future__ import annotations

import asyncio
from pathlib import Path

from browser import Browser

from kvcatch.views.html.content import Report, gather
from kvcatch.views.html.page import render

CRASH = str(Path(__file__).parents[2] / "data" / "top" / "crash.kvcap")


def test_a_person_can_read_and_use_the_page(tmp_path):
    page = tmp_path / "report.html"
    content = gather(CRASH)
    page.write_text(render(content), encoding="utf-8")
    asyncio.run(_use(page, tmp_path, content))


async def _use(file: Path, folder: Path, content: Report) -> None:
    async with Browser(folder) as page:
        await page.open(file)
        assert await page.js("document.documentElement.dataset.ready") == "1"
        assert await page.js("document.querySelectorAll('.plot svg').length") == 12
        assert await page.js("document.documentElement.scrollWidth <= innerWidth")

        # Hover: the tip says what the picture shows there.
        left, top, width, height = await page.box("#use svg")
        await page.mouse("mouseMoved", left + width / 2, top + height / 2)
        said = await page.js("document.getElementById('tip').textContent")
        assert "active" in said
        assert "TTFT" in said or "first token" in said

        # Zoom: a drag over the middle third shows a third of the run in every chart.
        whole = await page.js("document.getElementById('window').textContent")
        for kind, part in (("mousePressed", 1 / 3), ("mouseMoved", 0.5), ("mouseReleased", 2 / 3)):
            await page.mouse(kind, left + width * part, top + height / 2)
        assert await page.js("document.getElementById('window').textContent") != whole
        labels = await page.js("[...document.querySelectorAll('#queues text')].at(-1).textContent")
        left, top, width, height = await page.box("#reset")
        await page.mouse("mousePressed", left + 5, top + 5)
        await page.mouse("mouseReleased", left + 5, top + 5)
        assert await page.js("document.getElementById('window').textContent") == whole
        assert await page.js("[...document.querySelectorAll('#queues text')].at(-1).textContent") != labels

        # Filter: only requests of that tenant stay.
        await page.js("document.getElementById('filter').focus()")
        await page.call("Input.insertText", text="umbrella")
        shown = await page.js("document.getElementById('page').textContent")
        assert int(shown.split()[0]) < 103
        names = await page.js(
            "[...document.querySelectorAll('#lives text')].map(t => t.textContent).filter(t => !t.endsWith('Z'))"
        )
        assert sorted(names) == sorted(
            row[0] for row in content.charts["lives"]["rows"] if row[1] == "umbrella"
        )

        # Keyboard: a chart takes the focus, arrows read values, plus zooms, Escape goes back.
        await page.js("document.getElementById('use').focus()")
        await page.key("ArrowRight")
        assert "active" in await page.js("document.getElementById('tip').textContent")
        await page.key("+")
        assert await page.js("document.getElementById('window').textContent") != whole
        await page.key("Escape")
        assert await page.js("document.getElementById('window').textContent") == whole

        # The time of a finding leads to its moment; dark is dark.
        await page.js("document.querySelector('button.when').click()")
        assert await page.js("document.getElementById('window').textContent") != whole
        light = await page.js("getComputedStyle(document.body).backgroundColor")
        await page.js("document.getElementById('theme').click()")
        assert await page.js("getComputedStyle(document.body).backgroundColor") != light
        assert page.problems == []
