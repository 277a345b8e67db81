"""A watched target: maxima between looks, headroom, curves, and what happens when it dies."""

from __future__ import annotations

import time

from fakes.capture import FakeCapture, request, snapshot
from kvcatch.errors import KVCatchError
from kvcatch.results import Headroom, LossView, Pool
from kvcatch.views.live import Watch


def watch(capture: FakeCapture, **options) -> Watch:
    return Watch("live", lambda target: capture, **options)


def sample(seconds_ago: float, **values: int) -> dict[str, int]:
    return {"unix_ns": time.time_ns() - int(seconds_ago * 1e9), **values}


def test_maxima_cover_the_time_since_the_previous_look():
    capture = FakeCapture()
    looking = watch(capture)
    assert looking.poll().pool.active_blocks_max == 72  # the first look has the record's own window
    capture.rows = [sample(3600, active_blocks=99), sample(0, active_blocks=81, running=9, waiting=4)]
    second = looking.poll()
    assert (second.pool.active_blocks_max, second.queues.running_max, second.queues.waiting_max) == (81, 9, 4)
    assert looking.poll().pool.active_blocks_max == 60  # nothing new: the value itself


def test_a_dead_engine_keeps_the_maxima_of_its_last_minute():
    looking = watch(FakeCapture(snapshot(state="ended")))
    looking.poll()
    assert looking.poll().pool.active_blocks_max == 72


def test_headroom_uses_the_median_request_or_the_size_asked_for():
    # free + cached = 40 blocks; 64 + 16 - 1 tokens need 5: 8 requests.
    assert watch(FakeCapture()).poll().headroom == Headroom(
        requests=8, prompt_tokens=64, output_tokens=16, limit="blocks"
    )
    assert watch(FakeCapture(), size=(160, 1)).poll().headroom.requests == 4


def test_a_dead_target_keeps_its_last_state_and_says_so():
    capture = FakeCapture()
    looking = watch(capture)
    looking.poll()
    capture.broken = KVCatchError("connection refused")
    gone = looking.poll()
    assert (gone.state, gone.pool.active_blocks, looking.problem) == (
        "disconnected",
        60,
        "connection refused",
    )
    assert gone.data_age_seconds is not None
    assert gone.data_age_seconds >= 0.2
    capture.broken = None
    assert looking.poll().state == "live"
    assert looking.problem == ""


def test_a_target_that_is_not_there_yet_is_connecting():
    tries = []

    def opener(target: str | None) -> FakeCapture:
        tries.append(target)
        if len(tries) < 3:
            raise KVCatchError("no route")
        return FakeCapture()

    looking = Watch("http://node:8000", opener)
    assert [looking.poll().state for _ in range(3)] == ["connecting", "connecting", "live"]
    assert looking.name == "live:4242"


def test_curves_take_peaks_from_samples_and_ttft_from_requests():
    now = time.time()
    first = request("a", "acme", 4, arrival_unix_seconds=now - 30, ttft_seconds=2.0)
    capture = FakeCapture(snapshot(requests=(first,)))
    capture.rows = [
        sample(250, active_blocks=10),
        sample(90, active_blocks=90),
        sample(80, active_blocks=20),
    ]
    looking = watch(capture)
    looking.poll()
    curve = looking.curves(3)  # three bins of 100 s
    assert curve.utilization == [0.1, 0.1, 0.9]
    assert curve.ttft_seconds == [None, None, 2.0]


def test_curves_of_a_source_without_samples_come_from_the_looks():
    capture = FakeCapture(snapshot(requests=()))
    looking = watch(capture)
    looking.poll()
    looking.poll()
    curve = looking.curves(10)
    assert curve.utilization[-1] == 0.6
    assert curve.ttft_seconds[-1] == 0.5


def test_findings_that_the_snapshot_proves_are_added():
    assert [finding.code for finding in watch(FakeCapture()).poll().findings] == ["KVC003"]
    quiet = snapshot(pool=Pool(), requests=(), loss=LossView())
    assert watch(FakeCapture(quiet)).poll().findings == ()


def test_a_watch_of_the_newest_recorder_goes_over_to_the_engines_next_life():
    lives = {"first": FakeCapture(snapshot(target="first")), "second": FakeCapture(snapshot(target="second"))}
    names = ["first"]
    looking = Watch(None, lambda target: lives[target or "first"], newest=lambda: names[-1])
    assert looking.poll().target == "first"
    names.append("second")
    assert looking.poll().target == "first"  # it still lives
    lives["first"].state = snapshot(target="first", state="ended")
    assert looking.poll().state == "ended"
    assert looking.poll().target == "second"
    assert lives["first"].closed


def test_closing_closes_the_capture():
    capture = FakeCapture()
    looking = watch(capture)
    looking.close()
    looking.poll()
    looking.close()
    assert capture.closed
