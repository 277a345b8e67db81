"""The life of one request, told from events and from its own numbers."""

from __future__ import annotations

from fakes.capture import ARRIVAL, request, snapshot
from kvcatch.views.lifeline import Life, detail_lines, grown, life_line, life_of
from kvcatch.views.palette import Look, plain

KEY = "cmpl-long-doc-0-0011aabb"


def event(seconds: float, kind: str, rid: int = 7, **more) -> dict[str, object]:
    return {"kind": kind, "source": 0, "unix_ns": int((ARRIVAL + seconds) * 1e9), "rid": rid, **more}


EVENTS = [
    event(-1.0, "blocks", block_ids=[1], rid=6),
    event(0.0, "arrive", engine_request_id=KEY, tags={}),
    event(0.1, "arrive", engine_request_id="another", rid=8),
    event(0.2, "new", hit_tokens=32),
    event(0.2, "blocks", block_ids=[1, 2, 3]),
    event(1.5, "blocks", block_ids=[9], rid=8),
    event(2.0, "evict", block_ids=[77]),
    event(3.0, "blocks", block_ids=[4]),
    event(4.0, "preempt", cause="blocks", freed_blocks=4),
    event(6.0, "resume", hit_tokens=16),
    event(6.0, "blocks", block_ids=[5, 6, 7, 8, 9]),
    event(8.0, "finish", reason="stop", output_tokens=20),
    event(9.0, "blocks", block_ids=[1]),
]
VIEW = request("long-doc", "umbrella", 5, queue_seconds=1.0, ttft_seconds=2.0)


def texts(lines) -> list[str]:
    return [plain(line) for line in lines]


def test_moments_and_blocks_are_collected_for_this_request_alone():
    life = life_of(VIEW, EVENTS)
    assert [kind for _, kind, _ in life.moments] == [
        "arrival", "scheduled", "first", "preempted", "scheduled", "finish",
    ]  # fmt: skip
    assert [(round(when - ARRIVAL, 1), held) for when, held in life.blocks] == [
        (0.2, 3), (3.0, 4), (4.0, 0), (6.0, 5), (8.0, 0),
    ]  # fmt: skip


def test_sliding_groups_give_blocks_back_and_a_refresh_starts_over():
    events = [
        event(0, "refresh", engine_request_id=KEY),
        event(0, "blocks", block_ids=[1, 2, 3]),
        event(1, "drop", count=2),
        event(2, "replace", block_ids=[3, 4]),
        event(3, "refresh", engine_request_id=KEY),
        event(3, "blocks", block_ids=[3, 4]),
    ]
    assert [held for _, held in life_of(VIEW, events).blocks] == [3, 1, 2, 2]


def test_marks_stand_at_their_time_on_the_axis():
    look = Look(width=89)  # 80 columns of axis for 8 seconds: ten a second
    axis, blocks, scale, *rest = texts(life_line(VIEW, life_of(VIEW, EVENTS), look, now=None))
    marks = {index - 9: letter for index, letter in enumerate(axis) if index >= 9 and letter != "─"}
    assert marks == {0: "A", 10: "S", 20: "F", 40: "✕", 60: "S", 79: "■"}
    assert blocks[9 + 10] == "▅"  # three of the five it held at most
    assert blocks[9 + 50] == "▁"  # preempted: none
    assert blocks[9 + 70] == "█"  # five blocks, the most it held
    assert "most held 5 blocks" in scale
    assert any("preempted" in line and "cause: blocks, 4 blocks freed" in line for line in rest)
    assert any("finish" in line and "stop, 20 output tokens" in line for line in rest)


def test_without_events_the_requests_own_times_serve():
    view = request("long-doc", "umbrella", 5)
    axis, *_ = texts(life_line(view, Life(), Look(width=89), now=ARRIVAL + 1.0))
    assert axis[9] == "A"
    assert axis[9 + 20] == "S"
    assert axis[9 + 40] == "F"
    assert axis.endswith("▶")
    unknown = request("x", "y", 1, arrival_unix_seconds=None)
    assert "n/a" in texts(life_line(unknown, Life(), Look(), now=None))[0]


def test_moments_in_one_column_do_not_hide_each_other():
    view = request("long-doc", "u", 1, queue_seconds=0.001, ttft_seconds=0.002)
    events = [EVENTS[1], event(60.0, "finish", reason="stop", output_tokens=1)]
    axis = texts(life_line(view, life_of(view, events), Look(), now=None))[0]
    assert axis[9:12] == "ASF"


def test_a_life_grows_with_each_look():
    life = grown(Life(), VIEW, ARRIVAL + 3)
    assert life.blocks == [(ARRIVAL + 3, 5)]
    hit = request("long-doc", "umbrella", 0, status="preempted", num_preemptions=1)
    life = grown(grown(life, hit, ARRIVAL + 4), hit, ARRIVAL + 5)
    assert [kind for _, kind, _ in life.moments] == ["arrival", "scheduled", "first", "preempted"]
    assert life.blocks == [(ARRIVAL + 3, 5), (ARRIVAL + 4, 0)]
    done = request("long-doc", "u", 0, num_preemptions=1, finish_reason="stop", age_seconds=6.0)
    assert grown(life, done, ARRIVAL + 9).moments[-1] == (ARRIVAL + 6, "finish", "stop")


def test_the_page_names_request_tags_blocks_and_fits_the_screen():
    view = request("long-doc", "umbrella", 40, num_preemptions=2, recomputed_tokens=900)
    lines = texts(detail_lines(view, life_of(view, EVENTS), snapshot(), Look(width=80)))
    assert max(map(len, lines)) <= 80
    page = "\n".join(lines)
    for words in (
        "request long-doc",
        "tenant=umbrella",
        KEY,
        "blocks 40 = 40.0% of the pool",
        "preempted 2",
        "recomputed 900",
    ):
        assert words in page
