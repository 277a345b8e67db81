"""The two orders of the waiting line, and who gets served among tenants."""

from __future__ import annotations

from collections import deque

from hypothesis import given, settings
from hypothesis import strategies as st

from kvcatch.policy.waiting import Job, VirtualTokens, WaitingLine


def job(name: str, size: int = 1, **fields: object) -> Job:
    made = Job(name, tokens=size, total=size, size=size, prompt_tokens=size, max_output=1)
    for key, value in fields.items():
        setattr(made, key, value)
    return made


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(st.sampled_from(["add", "front", "pop", "drop"]), st.integers(0, 20)), max_size=60))
def test_arrival_order_is_that_of_a_deque(actions: list[tuple[str, int]]) -> None:
    line, mirror = WaitingLine(), deque[str]()
    for number, (action, pick) in enumerate(actions):
        if action in ("add", "front"):
            made = job(str(number), size=1 + pick % 5, long=pick % 2 == 0)
            made.key = line.next_key(front=action == "front")
            line.add(made)
            (mirror.appendleft if action == "front" else mirror.append)(made.request_id)
        elif mirror:
            name = mirror[0] if action == "pop" else mirror[pick % len(mirror)]
            found = line.get(name)
            assert found is not None
            line.remove(found)
            mirror.remove(name)
        assert [each.request_id for each in line] == list(mirror)
        head = line.first()
        assert (head.request_id if head else None) == (mirror[0] if mirror else None)
        assert line.shorts == sum(not each.long for each in line)


def fill(line: WaitingLine, jobs: list[Job]) -> None:
    for each in jobs:
        each.key = line.next_key(front=False)
        line.add(each)


def test_candidates_short_first_then_size_then_arrival_without_the_head() -> None:
    line = WaitingLine()
    fill(line, [job("head", 9), job("b", 3), job("long", 2, long=True), job("a", 1), job("c", 3)])
    assert [j.request_id for j in line.candidates(0.0, 5.0, 10)] == ["a", "b", "c", "long"]


def test_starved_tier_comes_first_within_its_kind_oldest_first() -> None:
    line = WaitingLine()
    old = job("old-long", 8, long=True, queued_at=0.0)
    fill(line, [job("head", 9), job("old", 7, queued_at=1.0), old, job("new", 1, queued_at=9.0)])
    assert [j.request_id for j in line.candidates(10.0, 5.0, 10)] == ["old", "new", "old-long"]


def test_class_comes_before_everything_and_aging_does_not_change_it() -> None:
    line = WaitingLine()
    head = job("head", 9)
    starved = job("starved", 1, priority=1, queued_at=0.0)
    important = job("important", 8, priority=0, queued_at=99.0)
    fill(line, [head, starved, important])
    assert [j.request_id for j in line.candidates(100.0, 5.0, 10)] == ["important", "starved"]


def test_the_tenant_served_least_goes_first() -> None:
    virtual = VirtualTokens()
    line = WaitingLine(virtual)
    for tenant in ("a", "b"):
        virtual.arrive(tenant)
    virtual.serve("a", input_tokens=100, output_tokens=10)  # 120
    virtual.serve("b", input_tokens=110)
    fill(line, [job("head", 9), job("a1", 1, tenant="a"), job("b1", 5, tenant="b")])
    assert [j.request_id for j in line.candidates(0.0, 5.0, 10)] == ["b1", "a1"]


def test_a_returning_tenant_is_lifted_to_the_least_present_counter() -> None:
    virtual = VirtualTokens()
    virtual.arrive("busy")
    virtual.serve("busy", input_tokens=1000)
    virtual.arrive("idle")
    assert virtual["idle"] == 1000
    virtual.leave("idle")
    virtual.serve("busy", input_tokens=500)
    virtual.arrive("idle")
    assert virtual["idle"] == 1500


def test_counters_of_departed_tenants_do_not_pile_up() -> None:
    virtual = VirtualTokens()
    for i in range(20_000):
        virtual.arrive(f"t{i}")
        virtual.leave(f"t{i}")
    assert len(virtual._served) < 3000
