"""The page parser: real pages, both spellings, and everything that can be wrong with a page."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.parser import text_string_to_metric_families

from kvcatch.errors import KVCatchError
from kvcatch.sources.openmetrics import Page, canonical, parse

DATA = Path(__file__).parents[2] / "data" / "metrics"
RUNNING = "vllm_num_requests_running"


def page(text: str) -> Page:
    return parse([text.encode()])[0]


def reasons(text: str) -> dict[str, str]:
    return {row.series: row.reason for row in page(text).rejected}


@pytest.mark.parametrize("path", sorted(DATA.glob("*.prom")), ids=lambda path: path.stem)
def test_real_pages_give_what_the_reference_parser_gives(path: Path) -> None:
    """prometheus_client's own parser is the oracle for every series we keep."""
    text = path.read_text()
    expected = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            expected[canonical(sample.name), tuple(sorted(sample.labels.items()))] = sample.value
    got = page(text)
    assert got.rejected == []
    kept = {
        (name, tuple(sorted(sample.labels.items()))): sample.value
        for name, samples in got.samples.items()
        for sample in samples
    }
    assert len(kept) > 30
    assert kept == {key: expected[key] for key in kept}


def test_both_spellings_of_one_registry_give_the_same_page() -> None:
    registry = CollectorRegistry()
    labels = {"model_name": 'm "x"\\y\nz', "engine": "0"}
    Gauge("vllm:num_requests_running", "h", list(labels), registry=registry).labels(**labels).set(3)
    Counter("vllm:num_preemptions", "h", list(labels), registry=registry).labels(**labels).inc(7)
    histogram = Histogram("vllm:time_to_first_token_seconds", "h", list(labels), registry=registry)
    histogram.labels(**labels).observe(0.3, exemplar={"trace_id": "a } b # c"})
    classic = page(generate_latest(registry).decode())
    modern = page(generate_openmetrics(registry).decode())
    assert classic.samples == modern.samples
    assert classic.types == modern.types
    assert classic.samples["vllm_num_preemptions"][0].value == 7
    assert classic.samples[RUNNING][0].labels == labels
    assert modern.rejected == []


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('vllm:num_requests_running{engine="0"} NaN', "value is NaN"),
        ('vllm:num_requests_running{engine="0"} +Inf', "value is +Inf"),
        ('vllm:num_requests_running{engine="0"} many', "value 'many' is not a number"),
        ('vllm:num_requests_running{engine="0"} 0x10', "value '0x10' is not a number"),
        ('vllm:num_requests_running{engine="0",engine="1"} 3', "labels cannot be read"),
        ('vllm:num_requests_running{engine=0} 3', "labels cannot be read"),
        ('vllm:num_requests_running{engine="0"', "not a metric line"),
        ("vllm:num_requests_running", "not a metric line"),
    ],
)  # fmt: skip
def test_one_bad_line_is_refused_with_its_reason_and_the_rest_stays(line: str, reason: str) -> None:
    got = page(f"{line}\nvllm:num_requests_waiting 4.0\n")
    assert [row.reason for row in got.rejected] == [reason]
    assert RUNNING not in got.samples
    assert got.samples["vllm_num_requests_waiting"][0].value == 4


def test_the_same_series_twice_counts_once_or_not_at_all() -> None:
    same = page("vllm:num_requests_running 3\nvllm:num_requests_running 3.0\n")
    assert [sample.value for sample in same.samples[RUNNING]] == [3]
    assert same.rejected == []
    different = "vllm:num_requests_running 3\nvllm:num_requests_running 4\nvllm:num_requests_running 3\n"
    got = page(different + "vllm:num_requests_waiting 1\n")
    assert got.samples[RUNNING] == []
    assert got.rejected[0].reason == "given twice with different values (3 and 4)"
    again = "".join(f"vllm:num_requests_running {value}\n" for value in (3, 4, 5, 4, 3))
    assert page(again + "vllm:num_requests_waiting 1\n").num_rejected == 1


def test_a_page_that_stops_inside_a_line_loses_that_line() -> None:
    whole = (DATA / "vllm_0.32.0_cpu_loaded.prom").read_text()
    half_a_number = 'vllm:prompt_tokens_total{engine="0",model_name="tiny-llama"} 1799'  # of 179935.0
    got = page(whole[: whole.index(half_a_number) + len(half_a_number)])
    assert "vllm_prompt_tokens" not in got.samples
    assert got.rejected[-1].reason.startswith("no line end")
    assert got.samples["vllm_num_preemptions"][0].value == 29


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("<!DOCTYPE html>\n<html><body>vllm:num_requests_running 3\n</body></html>\n", "an HTML page"),
        ("  \n<html>", "an HTML page"),
        ('{"error": "not found"}', "JSON"),
        ("", "empty"),
        ("\n\n", "empty"),
        ("up 1\npython_info 1\n", "without series of vLLM"),
        ("\x00\x01\x02\n", "not a metrics page"),
        ("vllm:num_requests_running NaN\n", "no usable series"),
    ],
)
def test_what_is_no_metrics_page_is_named(text: str, words: str) -> None:
    with pytest.raises(KVCatchError, match=words):
        parse([text.encode()])


def test_stamps_divide_a_file_into_pages_before_or_after_each() -> None:
    first, second = "vllm:num_requests_running 1\n", "vllm:num_requests_running 2\n"
    before = f"# scrape_unix_ms 1000\n{first}# scrape_unix_ms 2500\n{second}"
    after = f"{first}# scrape_unix_ms 1000\n{second}# scrape_unix_ms 2500\n"
    for text in (before, after):
        pages = parse([text.encode()])
        got = [(found.unix_seconds, found.samples[RUNNING][0].value) for found in pages]
        assert got == [(1.0, 1.0), (2.5, 2.0)]


def test_a_fifty_megabyte_page_of_other_series_is_read_in_pieces() -> None:
    other = b'http_requests_total{handler="/v1/completions",method="POST",status="2xx"} 300.0\n' * 3000
    chunks = [other] * 210
    chunks.insert(100, b'vllm:num_requests_running{engine="0"} 5.0\n')
    assert sum(map(len, chunks)) > 50_000_000
    got = parse(iter(chunks))[0]
    assert got.samples[RUNNING][0].value == 5
    assert sum(map(len, got.samples.values())) == 1


def test_an_endless_line_does_not_pile_up() -> None:
    got = parse(
        [b"vllm:num_requests_waiting 1\n", *[b"x" * 100_000] * 20, b"\nvllm:num_requests_running 2\n"]
    )[0]
    assert got.samples[RUNNING][0].value == 2
    assert "line longer than" in got.rejected[0].reason


@given(st.binary(max_size=400), st.lists(st.integers(1, 60), max_size=8))
def test_any_bytes_in_any_pieces_give_a_page_or_an_error(data: bytes, cuts: list[int]) -> None:
    body = b"vllm:num_requests_running 3\n" + data + b"\nvllm:num_requests_waiting 4\n"
    pieces, rest = [], body
    for cut in cuts:
        pieces.append(rest[:cut])
        rest = rest[cut:]
    whole = parse([body])
    parts = parse([*pieces, rest])
    assert [found.samples for found in whole] == [found.samples for found in parts]
