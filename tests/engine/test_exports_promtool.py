"""The rules in the hands of Prometheus itself (promtool): every alert fires when it should, and only then."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from kvcatch.analysis.committed import committed_ratio
from kvcatch.sources.openmetrics import Page, parse
from kvcatch.sources.scrape import ScrapeCapture
from kvcatch.views import mixin_boards, mixin_rules
from kvcatch.views.mixin import write

KV = 'job="kv",instance="i",target="t",model_name="m",engine="0"'
VLLM = 'job="vllm",instance="v",model_name="m",engine="0"'
MINUTES = 40
FLAT = f"x{MINUTES}"


def pool(active: str, capacity: int = 100, waiting: int = 0, labels: str = KV) -> dict[str, str]:
    return {
        f'kvcatch_kv_cache_blocks{{{labels},tier="device",state="active"}}': active,
        f'kvcatch_kv_cache_capacity_blocks{{{labels},tier="device"}}': f"{capacity}+0{FLAT}",
        f'kvcatch_requests_waiting{{{labels},reason="blocks"}}': f"{waiting}+0{FLAT}",
        f'kvcatch_watermark_ratio{{{labels},source="assumed"}}': f"0.85+0{FLAT}",
    }


def engine(running: int, waiting: int, usage: float, tokens_per_minute: int = 0) -> dict[str, str]:
    return {
        f"vllm:num_requests_running{{{VLLM}}}": f"{running}+0{FLAT}",
        f"vllm:num_requests_waiting{{{VLLM}}}": f"{waiting}+0{FLAT}",
        f"vllm:kv_cache_usage_perc{{{VLLM}}}": f"{usage}+0{FLAT}",
        f"vllm:generation_tokens_total{{{VLLM}}}": f"0+{tokens_per_minute}{FLAT}",
        f"vllm:num_preemptions_total{{{VLLM}}}": f"0+0{FLAT}",
    }


def counter(name: str, per_minute: float, labels: str = KV) -> dict[str, str]:
    return {f"{name}{{{labels}}}": f"0+{per_minute}{FLAT}"}


def prefill(recomputed: float, all_tokens: float) -> dict[str, str]:
    return counter("kvcatch_preemption_recomputed_tokens_total", recomputed) | counter(
        "kvcatch_scheduled_tokens_total", all_tokens, f'{KV},phase="prefill"'
    )


def hits(queried: float, hit: float, evicted: float) -> dict[str, str]:
    return (
        counter("kvcatch_prefix_cache_queried_tokens_total", queried)
        | counter("kvcatch_prefix_cache_hit_tokens_total", hit)
        | counter("kvcatch_kv_block_evictions_total", evicted, f'{KV},tier="device",reason="capacity"')
    )


def bound(by_seqs: float, by_nothing: float) -> dict[str, str]:
    return counter("kvcatch_steps_total", by_seqs, f'{KV},bound="max_num_seqs"') | counter(
        "kvcatch_steps_total", by_nothing, f'{KV},bound="none"'
    )


def first_token(slow: int, fast: int) -> dict[str, str]:
    """Per minute: ``slow`` requests of 20 to 60 s, ``fast`` ones below 1 s."""
    name = "vllm:time_to_first_token_seconds_bucket"
    return {
        f'{name}{{{VLLM},le="1"}}': f"0+{fast}{FLAT}",
        f'{name}{{{VLLM},le="20"}}': f"0+{fast}{FLAT}",
        f'{name}{{{VLLM},le="60"}}': f"0+{fast + slow}{FLAT}",
        f'{name}{{{VLLM},le="+Inf"}}': f"0+{fast + slow}{FLAT}",
    }


def memory(others: int, device: str = "cuda:0") -> dict[str, str]:
    name = f'kvcatch_device_memory_bytes{{{KV},device="{device}",tp_rank="0",pp_rank="0",dp_rank="0",owner='
    owners = {"kv_cache": 60, "engine_other": 20, "other_processes": others, "free": 20 - others}
    return {f'{name}"{owner}"}}': f"{size}+0{FLAT}" for owner, size in owners.items()}


def two_engines(first: int, second: int, waiting: int) -> dict[str, str]:
    other = KV.replace('engine="0"', 'engine="1"')
    return pool(f"{first}+0{FLAT}", waiting=waiting) | pool(f"{second}+0{FLAT}", labels=other)


def flat(active: int, waiting: int = 0) -> dict[str, str]:
    return pool(f"{active}+0{FLAT}", waiting=waiting)


def up(value: int) -> dict[str, str]:
    return {f"kvcatch_up{{{KV}}}": f"{value}+0{FLAT}"}


def tenant(blocks: int) -> dict[str, str]:
    return {f'kvcatch_tenant_blocks{{{KV},tenant="acme"}}': f"{blocks}+0{FLAT}"}


def ratio(name: str, value: float) -> dict[str, str]:
    return {f"{name}{{{KV}}}": f"{value}+0{FLAT}"}


Series = dict[str, str]
#: alert -> (series that make it fire, series that are close but must not)
CASES: dict[str, tuple[list[Series], list[Series]]] = {
    "KVCatchKVPressure": ([flat(86, 2)], [flat(84, 2), flat(99, 0)]),
    "KVCatchKVPressureCritical": ([flat(96, 1)], [flat(94, 1), flat(100, 0)]),
    "KVCatchPreemptionStorm": ([prefill(11, 100)], [prefill(9, 100), prefill(0, 0)]),
    "KVCatchPreemptions": (
        [counter("vllm:num_preemptions_total", 70, VLLM)],
        [counter("vllm:num_preemptions_total", 50, VLLM)],
    ),
    "KVCatchTenantHog": ([flat(90, 1) | tenant(51)], [flat(90, 1) | tenant(49), flat(90, 0) | tenant(80)]),
    "KVCatchExhaustionAhead": (
        [pool(f"0+2.6{FLAT}")],
        [pool(f"0+0.5{FLAT}"), flat(90), pool(f"100-2{FLAT}")],
    ),
    "KVCatchRequestNeverFits": ([engine(0, 1, 0.0)], [engine(1, 1, 0.0), engine(0, 0, 0.0), engine(0, 1, 0.5)]),
    "KVCatchQueueNotKV": ([engine(8, 51, 0.3)], [engine(8, 51, 0.8), engine(8, 49, 0.3)]),
    "KVCatchSequenceLimit": (
        [flat(40) | bound(60, 30)],
        [flat(40) | bound(30, 60), flat(90) | bound(60, 30)],
    ),
    "KVCatchOtherProcessOnCard": ([memory(6)], [memory(4), memory(15, "cpu")]),
    "KVCatchPrefixEvicted": ([hits(100, 29, 1)], [hits(100, 31, 1), hits(100, 29, 0)]),
    "KVCatchHitRateUntrustworthy": (
        [counter("vllm:prefix_cache_queries_total", 450, VLLM) | counter("vllm:prompt_tokens_total", 100, VLLM)],
        [counter("vllm:prefix_cache_queries_total", 100, VLLM) | counter("vllm:prompt_tokens_total", 100, VLLM)],
    ),
    "KVCatchFragmentation": (
        [flat(60) | ratio("kvcatch_internal_fragmentation_ratio", 0.41)],
        [flat(60) | ratio("kvcatch_internal_fragmentation_ratio", 0.39),
         flat(40) | ratio("kvcatch_internal_fragmentation_ratio", 0.41)],
    ),
    "KVCatchEnginesUneven": ([two_engines(95, 50, 3)], [two_engines(95, 60, 3), two_engines(95, 50, 0)]),
    "KVCatchPoolUnknown": ([up(1)], [up(1) | flat(10), up(0)]),
    "KVCatchMetricStuck": ([engine(0, 0, 0.0, 6000)], [engine(0, 0, 0.0, 0), engine(1, 0, 0.1, 6000)]),
    "KVCatchCaptureLoss": (
        [counter("kvcatch_capture_dropped_records_total", 3)],
        [counter("kvcatch_capture_dropped_records_total", 0)],
    ),
    "KVCatchSlowFirstToken": ([first_token(2, 98)], [first_token(0, 100)]),
    "KVCatchSlowFirstTokenCritical": ([first_token(50, 50)], [first_token(0, 100)]),
    "KVCatchScaleOut": (
        [flat(80) | ratio("kvcatch_committed_ratio", 1.2)],
        [flat(80) | ratio("kvcatch_committed_ratio", 0.8), flat(80)],
    ),
    "KVCatchTargetDown": ([up(0)], [up(1)]),
}  # fmt: skip


@pytest.fixture(scope="module")
def mixin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mixin")
    write(str(folder), "https://example.org/runbook")
    return folder


def promtool(*words: str) -> str:
    done = subprocess.run(["promtool", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_prometheus_accepts_every_rule_file(mixin: Path) -> None:
    files = sorted(str(path) for path in mixin.glob("rules/*.yml"))
    said = promtool("check", "rules", *files)
    assert f"SUCCESS: {len(mixin_rules.ALERTS)} rules found" in said
    assert f"SUCCESS: {len(mixin_rules.RECORDING)} rules found" in said


def test_prometheus_accepts_the_configuration_of_the_recipe(mixin: Path, tmp_path: Path) -> None:
    recipe = (Path(__file__).parents[2] / "deploy" / "prometheus.yml").read_text()
    assert "/etc/prometheus/rules/" in recipe
    path = tmp_path / "prometheus.yml"
    path.write_text(recipe.replace("/etc/prometheus/rules/", f"{mixin}/rules/"))
    assert "SUCCESS" in promtool("check", "config", str(path))


def test_prometheus_accepts_every_expression_of_every_board(tmp_path: Path) -> None:
    expressions = [
        line.expr
        for _, members in (*mixin_boards.ROWS, *mixin_boards.FLEET)
        for panel in members
        for line in panel.lines
    ]
    rules = [
        {"record": f"check:panel:{index}", "expr": expr.replace("$__rate_interval", "1m")}
        for index, expr in enumerate(expressions)
    ]
    path = tmp_path / "panels.json.yml"
    path.write_text(json.dumps({"groups": [{"name": "panels", "rules": rules}]}))
    assert f"SUCCESS: {len(rules)} rules found" in promtool("check", "rules", str(path))


def test_there_is_a_case_for_every_alert() -> None:
    assert set(CASES) == {row.name for row in mixin_rules.ALERTS}
    assert all(fires and quiet for fires, quiet in CASES.values())


@pytest.mark.parametrize("name", sorted(CASES))
def test_each_alert_fires_when_it_should_and_stays_silent_otherwise(
    name: str, mixin: Path, tmp_path: Path
) -> None:
    row = next(row for row in mixin_rules.ALERTS if row.name == name)
    fires, quiet = CASES[name]
    files = [str(path) for path in sorted(mixin.glob("rules/*.yml"))]

    def group(series: Series, minute: int) -> dict[str, Any]:
        return {
            "interval": "15s",
            "input_series": [{"series": key, "values": _quarter(value)} for key, value in series.items()],
            "promql_expr_test": [
                {
                    "expr": f'count(ALERTS{{alertname="{name}",alertstate="firing"}}) or vector(0)',
                    "eval_time": f"{minute}m",
                    "exp_samples": [{"labels": "{}", "value": 1 if series in fires else 0}],
                }
            ],
        }

    # Long after the wait, and while a growing pool is still below its limit.
    minute = 32
    tests = [group(series, minute) for series in [*fires, *quiet]]
    # Nothing may fire before its time.
    if row.wait != "0m":
        early = group(fires[0], 1)
        early["promql_expr_test"][0]["exp_samples"][0]["value"] = 0
        tests.append(early)
    path = tmp_path / "test.yml"
    path.write_text(json.dumps({"rule_files": files, "evaluation_interval": "15s", "tests": tests}))
    promtool("test", "rules", str(path))


def _quarter(value: str) -> str:
    """``a+bxN`` per minute as the same line in steps of 15 seconds."""
    match = re.fullmatch(r"([-\d.]+)([+-])([\d.]+)x(\d+)", value)
    assert match is not None, value
    start, sign, step, count = match.groups()
    return f"{start}{sign}{float(step) / 4:g}x{int(count) * 4}"


def test_the_scale_out_signal_leads_the_first_preemption_of_a_recorded_incident(
    mixin: Path, tmp_path: Path
) -> None:
    """A real run of vLLM 0.32 (256 blocks of 32, 300 prompts of 599.8 tokens on average, 29 preemptions)."""
    data = Path(__file__).parents[1] / "data" / "metrics" / "conv_conc_snapshots.jsonl"
    rows = [json.loads(line) for line in data.read_text().splitlines()]
    grid = 0.5
    committed: list[float] = []
    preemptions: list[float] = []
    pages: list[Page] = []
    for row in rows:
        lines = [
            f'vllm:{name}{{engine="0",model_name="m"}} {value!r}'
            for name, value in row.items()
            if name != "t"
        ]
        size = 'vllm:request_prompt_tokens{part}{{engine="0",model_name="m"{le}}} {value}'
        lines += [
            size.format(part="_bucket", le=',le="+Inf"', value=300),
            size.format(part="_count", le="", value=300),
            size.format(part="_sum", le="", value=179_935),
            size.replace("prompt", "generation").format(part="_bucket", le=',le="+Inf"', value=300),
            size.replace("prompt", "generation").format(part="_count", le="", value=300),
            size.replace("prompt", "generation").format(part="_sum", le="", value=28_800),
            'vllm:cache_config_info{engine="0",block_size="32",num_gpu_blocks="256"} 1',
            "",
        ]
        pages += parse(["\n".join(lines).encode()])
        pages[-1].unix_seconds = 1000 + row["t"]
        capture = ScrapeCapture("x", pages=pages)
        assert capture.typical_size() == (600, 96)
        ratio_now = committed_ratio(capture.info, capture.snapshot(), 600)
        assert ratio_now is not None
        # The last value known at each point of the grid, as a scrape every half second would have seen it.
        while len(committed) * grid <= row["t"]:
            committed.append(ratio_now)
            preemptions.append(row["num_preemptions_total"])
    first = next(index for index, count in enumerate(preemptions) if count)
    signal = next(index for index, ratio in enumerate(committed) if ratio > 0.85)
    print(f"scale-out signal {(first - signal) * grid:.1f} s before the first preemption")
    series = {
        f"kvcatch_committed_ratio{{{KV}}}": committed,
        f'kvcatch_kv_cache_capacity_blocks{{{KV},tier="device"}}': [255.0] * len(committed),
        f"vllm:num_preemptions_total{{{VLLM}}}": preemptions,
    }
    rule, counted = "model_name:kvcatch_committed:ratio > 0.85", f"vllm:num_preemptions_total{{{VLLM}}} > 0"
    expected = ((signal - 1, 0, 0), (signal, 1, 0), (first - 1, 1, 0), (first, 1, 1))
    tests = [
        {"expr": f"count({expr}) or vector(0)", "eval_time": f"{int(index * grid * 1000)}ms",
         "exp_samples": [{"labels": "{}", "value": value}]}
        for index, above, preempted in expected
        for expr, value in ((rule, above), (counted, preempted))
    ]  # fmt: skip
    path = tmp_path / "incident.yml"
    group = {
        "interval": "500ms",
        "input_series": [
            {"series": name, "values": " ".join(f"{value:g}" for value in values)}
            for name, values in series.items()
        ],
        "promql_expr_test": tests,
    }
    files = [str(rules) for rules in sorted(mixin.glob("rules/*.yml"))]
    path.write_text(json.dumps({"rule_files": files, "evaluation_interval": "500ms", "tests": [group]}))
    promtool("test", "rules", str(path))
    assert first > signal


def test_the_exposition_passes_the_linter_of_prometheus() -> None:
    from prometheus_client.exposition import generate_latest

    from fakes.capture import FakeCapture
    from kvcatch.views.prometheus import registry
    from kvcatch.views.targets import Fleet, Target

    one = Target("x", lambda _: FakeCapture(), 1)
    one.read()
    page = generate_latest(registry(Fleet([one]).observations))
    done = subprocess.run(["promtool", "check", "metrics"], input=page, capture_output=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
