"""What the tables and panels say, at 80 columns and wide; by meaning, not by picture."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakes.capture import ARRIVAL, FakeCapture, request, snapshot
from kvcatch.results import Finding, Headroom, LossView, Pool, Queues, Snapshot
from kvcatch.views import panels, tables
from kvcatch.views.palette import STATES, Look, ansi, clean, plain
from kvcatch.views.panels import Curves, pool_bar
from kvcatch.views.text import snapshot_lines


def text(state: Snapshot, width: int = 80, **options) -> str:
    look = Look(width=width, ascii=options.pop("ascii", False))
    return ansi(snapshot_lines(state, look, **options), color=False, ascii_only=look.ascii)


def row(state: Snapshot, name: str, width: int = 80, **options) -> str:
    return next(line for line in text(state, width, **options).splitlines() if line.startswith(name))


@pytest.mark.parametrize("view", tables.VIEWS)
@pytest.mark.parametrize("width", [80, 160])
def test_no_line_is_wider_than_the_screen(view, width):
    state = snapshot(requests=tuple(request("x" * 70, "tenant-with-a-long-name", 5) for _ in range(30)))
    lines = text(state, width, view=view, curves=Curves(300, [0.5] * 200, [None, 0.1])).splitlines()
    assert max(len(line) for line in lines) <= width
    assert any("and 10 more" in line for line in lines)


def test_header_names_target_model_version_state_age_and_loss():
    state = snapshot(loss=LossView(dropped_records=12, hook_errors=1))
    first, second = (plain(line) for line in panels.header(state, Look(100)))
    for word in ("live", "0.2 s old", "live:4242", "tiny-llama", "vllm 0.32.0", "step 4,076"):
        assert word in first
    assert "lost 12, hook errors 1" in second


def test_a_long_target_gives_way_to_model_version_and_step():
    state = snapshot(
        target="/var/lib/kvcatch/20261129T182534-1ccb-a-very-long-name.core0.kvring", model="Qwen/Qwen3-8B"
    )
    first = plain(panels.header(state, Look(80))[0])
    assert len(first) <= 80
    assert "2026" in first
    assert "…  Qwen3-8B  vllm 0.32.0  step 4,076" in first


@pytest.mark.parametrize("state", STATES)
def test_every_state_is_a_word_and_a_glyph_of_its_own(state):
    glyphs = Look().glyphs.state
    assert len(set(glyphs.values())) == len(glyphs)
    assert plain(panels.header(snapshot(state=state), Look())[0]).startswith(f"{glyphs[state]} {state}")


def test_a_dead_engine_says_when_it_ended_not_how_fresh_it_is():
    first = plain(panels.header(snapshot(state="ended", unix_seconds=ARRIVAL), Look(120))[0])
    assert first.startswith("■ ended at 2025-11-29 ")
    assert " old" not in first


def test_the_worst_finding_is_in_the_header_and_all_are_explained_below():
    state = snapshot(
        findings=(
            Finding(code="KVC010", severity="info", title="limit is not the cache"),
            Finding(
                code="KVC005", severity="critical", title="never fits", cause="too long", remedy="abort it"
            ),
        )
    )
    shown = text(state)
    assert "KVC005 never fits  (+1)" in shown.splitlines()[1]
    assert "cause: too long" in shown
    assert "do: abort it" in shown
    assert "KVC010 info" in shown


def test_pool_bar_is_to_scale_with_the_watermark_drawn_and_labelled_assumed():
    bar, legend = (plain(line) for line in pool_bar(snapshot(), Look(106)))
    cells = bar.removeprefix("pool  ")
    assert len(cells) == 100  # 100 blocks on 100 columns: one each; the mark replaces the 86th cell
    assert (cells.count("█"), cells.count("▒"), cells.count("·")) == (60, 25, 14)
    assert cells.index("┊") == 85
    assert "watermark 85% assumed" in legend
    assert "active 60.0% max 72.0%" in legend


def test_a_measured_watermark_is_not_called_assumed():
    pool = msgspec.structs.replace(
        snapshot().pool, watermark_utilization_ratio=0.5, watermark_source="measured"
    )
    bar, legend = (plain(line) for line in pool_bar(snapshot(pool=pool), Look(106)))
    assert bar.removeprefix("pool  ").index("┊") == 50
    assert "watermark 50% measured" in legend


@given(st.integers(1, 5000), st.data())
def test_pool_bar_never_hides_a_state_that_holds_blocks(total, data):
    active = data.draw(st.integers(0, total))
    cached = data.draw(st.integers(0, total - active))
    blocks = {"active": active, "cached": cached, "free": total - active - cached}
    cells = panels._cells(active, cached, total, 73)
    assert len(cells) == 73
    for role, count in blocks.items():
        assert (role in cells) == (count > 0)
        assert abs(cells.count(role) - count / total * 73) <= 2.5


def test_unknown_is_na_never_zero():
    state = Snapshot(
        target="http://node:8000/metrics", source="scrape", pool=Pool(), queues=Queues(running=2)
    )
    shown = text(state)
    assert "model n/a" in shown
    assert "pool  n/a" in shown
    assert "active n/a" in shown
    assert "waiting n/a for blocks" in shown
    assert "headroom n/a" in shown
    assert "'kvcatch run -- COMMAND' would record them" in shown
    assert " 0.0%" not in shown


def test_a_metrics_page_shows_the_fraction_and_the_sum_it_knows():
    state = Snapshot(source="scrape", pool=Pool(utilization_ratio=0.25), queues=Queues(waiting=3))
    bar, legend = (plain(line) for line in pool_bar(state, Look(106)))
    assert bar.count("█") == 25
    assert "active 25.0%  · cached or free 75.0%" in legend
    assert "waiting 3 (for blocks: n/a)" in text(state)


def test_requests_are_sorted_by_blocks_held_and_unknown_ones_come_last():
    state = snapshot(requests=(*snapshot().requests, request("lost", "acme", 1, num_blocks=None)))
    built = tables.table(state, "requests", Look(80))
    assert [view.request_id for view in built.rows] == ["long-doc", "chat-1", "chat-2", "queued-9", "lost"]
    up = tables.table(state, "requests", Look(80), sort="blocks", reverse=False)
    assert [view.request_id for view in up.rows][-1] == "lost"


@pytest.mark.parametrize("needle", ["umbrella", "tenant=umb", "LONG", "cmpl-long"])
def test_filter_matches_id_tenant_tag_and_engine_id(needle):
    built = tables.table(snapshot(), "requests", Look(80), needle=needle)
    assert [view.request_id for view in built.rows] == ["long-doc"]
    assert built.total == 4


def test_columns_follow_the_view_and_the_width():
    assert row(snapshot(), "long-doc").split() == [
        "long-doc", "umbrella", "running", "40", "40.0%", "40", "639", "2",
    ]  # fmt: skip
    # 639 tokens in 40 blocks of 16: 640 slots, one unused.
    assert row(snapshot(), "long-doc", view="fragmentation").split()[2:6] == ["40", "639", "640", "99.8%"]
    narrow = tables.table(snapshot(), "requests", Look(80)).columns
    wide = tables.table(snapshot(), "requests", Look(160)).columns
    assert len(wide) > len(narrow)
    assert wide[0].width > narrow[0].width


def test_a_count_too_wide_for_its_column_is_shortened_not_cut():
    state = snapshot(requests=(request("huge", "acme", 40, num_tokens=12_345_678),))
    assert row(state, "huge").split()[6] == "12.35M"
    assert len(row(state, "huge")) <= 80


def test_slots_per_request_are_unknown_with_several_groups():
    groups = (*snapshot().groups, *snapshot().groups)
    assert row(snapshot(groups=groups), "long-doc", view="fragmentation").split()[4:6] == ["n/a", "n/a"]


def test_view_numbers():
    assert "930 tokens in 960 slots" in text(snapshot(), view="fragmentation")
    assert "internal fragmentation 3.1%" in text(snapshot(), view="fragmentation")
    assert "bound by KV blocks" in text(snapshot(), view="scheduling")
    assert "recomputed 1,204 tok" in text(snapshot(), view="scheduling")
    assert "prefix hit 45.2%  = 452 of 1,000 tokens" in text(snapshot(), view="reuse")
    room = Headroom(requests=8, prompt_tokens=64, output_tokens=16, limit="blocks")
    assert "headroom 8 × (64+16 tokens), limit blocks" in text(snapshot(headroom=room))


def test_decisions_have_a_column_where_kvcatchs_own_scheduler_decides():
    requests = (
        msgspec.structs.replace(request("long-doc", "acme", 5), decision="held: short of blocks"),
        request("short", "acme", 5),
    )
    governed = snapshot(requests=requests)
    assert "held: short of blocks" in row(governed, "long-doc", view="scheduling")
    assert "n/a" in row(governed, "short", view="scheduling")
    assert "decision" not in text(snapshot(), view="scheduling")


def test_ascii_output_is_ascii_and_colour_is_only_where_asked():
    state = snapshot()
    curves = Curves(300, [0.1, 0.9], [None, 0.0001])
    shown = ansi(snapshot_lines(state, Look(80, ascii=True), curves=curves), color=False, ascii_only=True)
    assert shown.isascii()
    assert "\x1b" not in shown
    assert "\x1b[" in ansi(snapshot_lines(state, Look(80)), color=True)


def test_names_from_clients_cannot_steer_the_terminal():
    evil = "\x1b[2J\x07id\n"
    shown = text(snapshot(requests=(request(evil, "a\x1b]0;x", 4),)))
    assert "\x1b" not in shown
    assert "\x07" not in shown
    assert "?[2J?id?" in shown
    assert clean("ok µs", ascii_only=True) == "ok us"


def test_sparkline_scales_to_its_top_and_leaves_gaps():
    assert panels.spark([0.0, None, 0.5, 1.0], 4, 1.0, Look()) == "▁ ▅█"
    assert panels.spark([1.0], 3, 1.0, Look()) == "  █"
    assert panels.spark([0.0], 1, 0.0, Look()) == "▁"


def test_fake_capture_is_a_capture():
    assert FakeCapture().snapshot().pool.num_blocks == 100
