"""Draw the pictures of ``kvcatch top`` in docs/img from the committed record of a real engine.

python tools/tui_pictures.py
"""

from __future__ import annotations

import asyncio
import os
import re
import time
from pathlib import Path

from kvcatch import api
from kvcatch.cli.moment import capture_at
from kvcatch.store.base import Capture
from kvcatch.views.live import Watch
from kvcatch.views.tui.app import TopApp

ROOT = Path(__file__).resolve().parent.parent
CAPTURE = ROOT / "tests" / "data" / "top" / "crash.kvcap"
#: file name, terminal size, view, moment of the record (None = its end), keys to press
PICTURES: tuple[tuple[str, tuple[int, int], str, str | None, tuple[str, ...]], ...] = (
    ("top-80x24", (80, 24), "capacity", None, ()),
    ("top-scheduling-140x30", (140, 30), "scheduling", None, ()),
    ("top-request-100x20", (100, 20), "capacity", None, ("slash", *"chat-0069", "enter", "enter")),
    ("top-tenants-80x16", (80, 16), "capacity", "12s", ("t",)),
)


async def draw(
    name: str, size: tuple[int, int], view: str, moment: str | None, keys: tuple[str, ...]
) -> None:
    """One picture."""

    def opener(target: str | None) -> Capture:
        capture = api.open(target)
        return capture if moment is None else capture_at(capture, moment)

    watch = Watch(str(CAPTURE), opener)
    app = TopApp([watch], interval=3600, view=view)
    async with app.run_test(size=size) as pilot:
        await app.workers.wait_for_complete()
        await pilot.press(*keys)
        await app.workers.wait_for_complete()
        await pilot.pause()
        svg = app.export_screenshot(title="kvcatch top")
    # The exporter asks the network for a font; every reader has some monospaced one.
    svg = re.sub(r"@font-face \{.*?\}", "", svg, flags=re.DOTALL).replace("Fira Code", "monospace")
    (ROOT / "docs" / "img" / f"{name}.svg").write_text(svg, encoding="utf-8")


def main() -> None:
    os.environ["TZ"] = "UTC"
    time.tzset()
    for picture in PICTURES:
        asyncio.run(draw(*picture))
        print(f"Wrote docs/img/{picture[0]}.svg")


if __name__ == "__main__":
    main()
