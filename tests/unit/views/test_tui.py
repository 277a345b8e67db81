"""The live screen driven as a person would, at 80×24 and 160×48, without a clock."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from textual.pilot import Pilot

from fakes.capture import FakeCapture, request, snapshot
from kvcatch.errors import KVCatchError
from kvcatch.results import LossView
from kvcatch.views.live import Watch
from kvcatch.views.tui.app import TopApp
from kvcatch.views.tui.rows import Rows
from kvcatch.views.tui.screens import HELP, Page

Script = Callable[[TopApp, "Pilot[int]"], Awaitable[None]]


def screen(app: TopApp) -> list[str]:
    """What is on the terminal, line by line."""
    strips = app.screen._compositor.render_strips()
    return ["".join(segment.text for segment in strip) for strip in strips]


def drive(script: Script, *captures: FakeCapture, size: tuple[int, int] = (80, 24), **options) -> None:
    found = list(captures or [FakeCapture()])
    watches = [Watch(str(index), lambda _, capture=capture: capture) for index, capture in enumerate(found)]
    app = TopApp(watches, interval=3600, **options)

    async def main() -> None:
        async with app.run_test(size=size) as pilot:
            await settle(app, pilot)
            await script(app, pilot)

    asyncio.run(main())


async def settle(app: TopApp, pilot: Pilot[int]) -> None:
    await app.workers.wait_for_complete()
    await app.look_once()
    await pilot.pause()


async def press(app: TopApp, pilot: Pilot[int], *keys: str) -> list[str]:
    await pilot.press(*keys)
    await app.workers.wait_for_complete()
    await pilot.pause()
    return screen(app)


def find(lines: list[str], words: str) -> int:
    return next(index for index, line in enumerate(lines) if words in line)


@pytest.mark.parametrize("size", [(80, 24), (160, 48)])
def test_everything_that_matters_is_on_the_first_screen(size):
    async def script(app, pilot):
        lines = screen(app)
        assert len(lines) == size[1]
        assert max(len(line.rstrip()) for line in lines) <= size[0]
        assert "● live" in lines[0]
        assert "tiny-llama  vllm 0.32.0" in lines[0]
        assert "KVC003" in lines[1]
        assert lines[2].startswith("pool  █")
        assert "watermark 85% assumed" in lines[3]
        assert find(lines, "long-doc   ") < find(lines, "chat-1") < find(lines, "queued-9")
        assert lines[-1].startswith("q quit  ? help  space pause  / filter")
        assert "requests 4/4" in lines[-1]

    drive(script, size=size)


def test_pause_keeps_the_state_and_says_so():
    async def script(app, pilot):
        capture = app.watches[0].capture
        looks = capture.refreshed
        lines = await press(app, pilot, "space")
        assert "PAUSED" in lines[0]
        app._look()
        await app.workers.wait_for_complete()
        assert capture.refreshed == looks
        assert "PAUSED" not in (await press(app, pilot, "space"))[0]

    drive(script)


def test_filter_narrows_and_escape_forgets_it():
    async def script(app, pilot):
        lines = await press(app, pilot, "slash", *"umbrella", "enter")
        assert "requests 1/4" in lines[-1]
        assert not any("chat-1" in line for line in lines)
        lines = await press(app, pilot, "escape")
        assert "requests 4/4" in lines[-1]
        lines = await press(app, pilot, "slash", *"zzz", "enter")
        assert any("no requests match 'zzz'" in line for line in lines)

    drive(script)


def test_sort_goes_through_the_columns_and_turns():
    async def script(app, pilot):
        assert "s blocks↓" in screen(app)[-1]
        lines = await press(app, pilot, "S")
        assert "s blocks↑" in lines[-1]
        assert find(lines, "queued-9") < find(lines, "long-doc   ")
        lines = await press(app, pilot, "s")
        assert "s share↓" in lines[-1]
        assert find(lines, "long-doc   ") < find(lines, "queued-9")

    drive(script)


def test_views_and_tables_change_columns_and_numbers():
    async def script(app, pilot):
        shown = {}
        for _ in range(5):
            shown[app.view] = "\n".join(screen(app))
            await press(app, pilot, "v")
        assert "930 tokens in 960 slots" in shown["fragmentation"]
        assert "bound by KV blocks" in shown["scheduling"]
        assert "prefix hit 45.2%" in shown["reuse"]
        tables = {}
        for _ in range(4):
            tables[app.table_name] = "\n".join(screen(app))
            await press(app, pilot, "t")
        assert "umbrella" in tables["tenants"]
        assert "dp0 pp0 tp0" in tables["ranks"]
        assert "262,144" in tables["groups"]

    drive(script)


def test_enter_opens_the_request_under_the_cursor_and_escape_comes_back():
    async def script(app, pilot):
        lines = await press(app, pilot, "down", "enter")
        assert isinstance(app.screen, Page)
        assert lines[0].startswith("request chat-1")
        assert any(line.startswith("life     A") for line in lines)
        lines = await press(app, pilot, "escape")
        assert lines[2].startswith("pool")

    drive(script)


def test_the_cursor_pages_through_thousands_and_stays_on_screen():
    many = snapshot(requests=tuple(request(f"r-{index:04d}", "acme", 3000 - index) for index in range(3000)))

    async def script(app, pilot):
        assert find(screen(app), "r-0000") < find(screen(app), "r-0005")
        lines = await press(app, pilot, "pagedown", "pagedown", "down")
        rows = app.query_one(Rows)
        assert rows.cursor == 2 * rows.page_rows + 1
        assert any(f"r-{rows.cursor:04d}" in line for line in lines)
        lines = await press(app, pilot, "end")
        assert "r-2999" in lines[-2]
        lines = await press(app, pilot, "enter")
        assert lines[0].startswith("request r-2999")
        lines = await press(app, pilot, "escape", "home")
        assert any("r-0000" in line for line in lines)

    drive(script, FakeCapture(many))


def test_the_mouse_moves_and_opens():
    async def script(app, pilot):
        await pilot.click(Rows, offset=(3, 2))
        assert app.query_one(Rows).row.request_id == "chat-1"
        await pilot.click(Rows, offset=(3, 3), times=2)
        await pilot.pause()
        assert screen(app)[0].startswith("request chat-2")

    drive(script)


def test_enter_on_a_tenant_shows_its_requests():
    async def script(app, pilot):
        lines = await press(app, pilot, "t", "enter")
        assert app.table_name == "requests"
        assert "requests 1/4" in lines[-1]
        assert any("long-doc" in line for line in lines[8:])

    drive(script)


def test_the_cursor_stays_on_its_request_when_the_order_changes():
    capture = FakeCapture()

    async def script(app, pilot):
        await press(app, pilot, "down", "down")  # chat-2
        capture.state = snapshot(requests=(request("new-hog", "acme", 30), *capture.state.requests))
        await settle(app, pilot)
        lines = await press(app, pilot, "enter")
        assert lines[0].startswith("request chat-2")

    drive(script, capture)


def test_a_target_that_dies_is_disconnected_with_its_reason_and_comes_back():
    capture = FakeCapture()

    async def script(app, pilot):
        capture.broken = KVCatchError("connection refused")
        await settle(app, pilot)
        lines = screen(app)
        assert "✕ disconnected" in lines[0]
        assert "connection refused" in lines[1]
        assert lines[2].startswith("pool  █")  # the last known state stays on screen
        capture.broken = None
        await settle(app, pilot)
        assert "● live" in screen(app)[0]

    drive(script, capture)


def test_tab_switches_targets():
    other = FakeCapture(snapshot(target="live:77", model="other-model", requests=()))

    async def script(app, pilot):
        assert "1/2" in screen(app)[0]
        lines = await press(app, pilot, "tab")
        assert "live:77" in lines[0]
        assert "2/2" in lines[0]
        assert any("no request holds or waits for blocks" in line for line in lines)

    drive(script, FakeCapture(), other)


def test_resize_redraws_for_the_new_width():
    async def script(app, pilot):
        await pilot.resize_terminal(160, 30)
        await pilot.pause()
        lines = screen(app)
        assert len(lines[2].rstrip()) == 160
        assert any("output" in line and "cached" in line and "queue" in line for line in lines)
        await pilot.resize_terminal(50, 20)
        await pilot.pause()
        assert max(len(line.rstrip()) for line in screen(app)) <= 50

    drive(script)


def test_f_explains_the_findings_and_what_is_missing():
    state = snapshot(loss=LossView(warnings=("cut at byte 99",), unknown=("groups",)))

    async def script(app, pilot):
        page = "\n".join(await press(app, pilot, "f"))
        assert "KVC003 info" in page
        assert "do: " in page
        assert "warning: cut at byte 99" in page
        assert "unknown here: groups" in page

    drive(script, FakeCapture(state))


def test_help_names_every_key():
    async def script(app, pilot):
        page = "\n".join(await press(app, pilot, "question_mark"))
        assert max(map(len, HELP.splitlines())) <= 80
        for word in ("quit", "pause", "filter", "sort", "view", "table", "target", "never zero"):
            assert word in page
        await press(app, pilot, "escape")
        assert not isinstance(app.screen, Page)

    drive(script)


def test_a_look_that_ends_while_a_page_opens_does_no_harm():
    async def script(app, pilot):
        app.action_help()
        app.redraw()
        await pilot.pause()
        assert isinstance(app.screen, Page)

    drive(script)


def test_ascii_screen_is_ascii():
    async def script(app, pilot):
        assert all(line.isascii() for line in screen(app))

    drive(script, ascii_only=True)


def test_w_writes_the_state_unless_readonly(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    async def script(app, pilot):
        await press(app, pilot, "w")

    drive(script, readonly=True)
    assert list(tmp_path.iterdir()) == []
    drive(script)
    (written,) = tmp_path.iterdir()
    assert '"active_blocks": 60' in written.read_text()


@pytest.mark.parametrize("key", ["q", "ctrl+c"])
def test_q_and_ctrl_c_leave(key):
    async def script(app, pilot):
        await pilot.press(key)
        await pilot.pause()
        assert not app.is_running

    drive(script)


class Asked:
    """Writes down what the screen asked for."""

    def __init__(self, problem: KVCatchError | None = None) -> None:
        self.calls: list[tuple[object, ...]] = []
        self.problem = problem

    def abort(self, request_id: str) -> list[str]:
        self.calls.append(("abort", request_id))
        if self.problem:
            raise self.problem
        return [f"aborted {request_id} (relaying)"]

    def hold(self, tenant: str, seconds: float) -> list[str]:
        self.calls.append(("hold", tenant, seconds))
        return [f"{tenant}: answered"]


def test_abort_asks_first_and_only_y_acts_once():
    operator = Asked()

    async def script(app, pilot):
        shown = "\n".join(await press(app, pilot, "question_mark"))
        assert "a        abort the request" in shown
        assert max(len(line) for line in shown.splitlines()) <= 80
        await press(app, pilot, "escape")
        lines = await press(app, pilot, "a")
        assert lines[0].startswith("Abort request long-doc?")
        await press(app, pilot, "enter")
        await press(app, pilot, "a", "escape")
        await press(app, pilot, "a", "a", "n", "escape")
        assert (operator.calls, len(app.screen_stack)) == ([], 1)
        lines = await press(app, pilot, "a", "y", "y")
        assert operator.calls == [("abort", "long-doc")]
        assert any("aborted long-doc (relaying)" in line for line in lines)
        await press(app, pilot, "escape", "down", "enter", "a", "y")
        assert operator.calls[1:] == [("abort", "chat-1")]
        await press(app, pilot, "escape", "escape", "question_mark", "a", "y")
        assert len(operator.calls) == 2
        # The request whose page was open before is not the one under the cursor now.
        lines = await press(app, pilot, "escape", "up", "a")
        assert lines[0].startswith("Abort request long-doc?")

    drive(script, operator=operator)


def test_hold_and_release_of_the_tenant_of_a_request_and_of_a_tenant_row():
    operator = Asked()

    async def script(app, pilot):
        assert "a abort  h hold" in screen(app)[-1]
        lines = await press(app, pilot, "h", "y")
        assert lines[0].startswith("Hold tenant umbrella?")
        assert any("umbrella: answered" in line for line in lines)
        await press(app, pilot, "escape", "t", "h", "r")
        assert operator.calls == [("hold", "umbrella", 600.0), ("hold", "umbrella", 0.0)]
        lines = await press(app, pilot, "escape", "a")
        assert "select one" in lines[0]

    drive(script, operator=operator, size=(120, 24))


def test_without_a_gateway_the_dialog_says_what_is_missing():
    async def script(app, pilot):
        shown = "\n".join(await press(app, pilot, "a", "y"))
        assert "no gateway runs" in shown
        assert "kvcatch gateway" in shown

    drive(script, operator=Asked(KVCatchError("no gateway runs.", "Start one: kvcatch gateway")))


def test_readonly_and_an_ended_record_change_nothing():
    operator = Asked()

    async def script(app, pilot):
        assert "a abort" not in screen(app)[-1]
        assert not any("abort" in line for line in await press(app, pilot, "question_mark"))
        await press(app, pilot, "escape")
        await press(app, pilot, "a", "y", "h", "y")
        assert (operator.calls, len(app.screen_stack)) == ([], 1)

    drive(script, operator=operator, readonly=True)

    async def ended(app, pilot):
        app.snapshots = [snapshot(state="ended")]
        app.paused = True
        lines = await press(app, pilot, "a", "y")
        assert "nothing to abort" in lines[0]
        assert operator.calls == []

    drive(ended, operator=operator, size=(160, 48))
