"""Dashboards, rules and runbook against the metric tables: nothing that does not exist is ever named."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcatch.analysis.rules import RULES
from kvcatch.cli.main import main
from kvcatch.engine_series import ENGINE_EXPOSED, ENGINE_SERIES
from kvcatch.metrics import BY_NAME, THRESHOLDS
from kvcatch.sources.openmetrics import canonical
from kvcatch.views import mixin_boards, mixin_rules
from kvcatch.views.mixin import contents
from kvcatch.views.mixin_runbook import runbook, sections
from kvcatch.views.yaml import dump

SERIES = re.compile(r"(?<![\w:])((?:vllm|kvcatch|engine|model_name):?[\w:]*)(\{[^}]*\})?")
LABELS = re.compile(r"(\w+)\s*(?:=~|!=|!~|=)")
TARGET_LABELS = {"job", "instance"}
ENGINE_LABELS = {"model_name", "engine", "le", "finished_reason"}


def panels() -> list[tuple[str, mixin_boards.Panel]]:
    rows = [*mixin_boards.ROWS, *mixin_boards.FLEET]
    return [(row, panel) for row, members in rows for panel in members]


def expressions() -> dict[str, str]:
    found = {f"record {name}": expr for name, expr in mixin_rules.RECORDING.items()}
    found |= {row.name: row.expr for row in mixin_rules.ALERTS}
    for row, panel in panels():
        for line in panel.lines:
            found[f"{row} / {panel.title} / {line.legend}"] = line.expr
    return found


def named(expr: str) -> list[tuple[str, set[str]]]:
    """Every series an expression reads, with the labels it selects on."""
    grouping = re.compile(r"(?:by|without|on|ignoring|group_left|group_right)\s*\([^)]*\)")
    return [
        (match.group(1), set(LABELS.findall(match.group(2) or "")))
        for match in SERIES.finditer(grouping.sub(" ", expr))
        if "_" in match.group(1)
    ]


@pytest.mark.parametrize("where", expressions())
def test_every_series_of_every_expression_exists_with_its_labels(where: str) -> None:
    expr = expressions()[where]
    read = named(expr)
    assert read or expr.startswith("vector(")
    for name, labels in read:
        if name in BY_NAME:
            assert labels <= set(BY_NAME[name].all_labels) | TARGET_LABELS, name
        elif name in mixin_rules.RECORDING:
            assert labels <= {"bound", "model_name", "engine", "target", "tier"} | TARGET_LABELS
        else:
            assert name in ENGINE_EXPOSED, name
            assert labels <= ENGINE_LABELS | TARGET_LABELS, name


def test_the_engine_names_on_boards_are_those_of_the_engine_table_or_of_a_real_page() -> None:
    """Boards elsewhere show series that vLLM dropped in 0.13; a real 0.32 page is the proof that ours exist."""
    page = (Path(__file__).parents[2] / "data" / "metrics" / "vllm_0.32.0_cpu_loaded.prom").read_text()
    optional = {name for name in ENGINE_EXPOSED if "kv_block" in name}  # only with --kv-cache-metrics
    for name in ENGINE_EXPOSED - optional:
        assert f"\n{name}{{" in page, name
    known = {name for row in ENGINE_SERIES for name in row.names}
    assert canonical("vllm:kv_cache_usage_perc") in known


def test_every_rate_on_a_board_uses_the_interval_of_the_board() -> None:
    for _, panel in panels():
        for line in panel.lines:
            for window in re.findall(r"\[([^\]]+)\]", line.expr):
                assert window == "$__rate_interval", panel.title


def test_ratios_never_average_ratios_and_pools_are_summed_on_both_sides() -> None:
    assert not [where for where, expr in expressions().items() if re.search(r"\bavg\b", expr)]


def test_the_rows_are_in_the_order_people_read_them() -> None:
    assert [row for row, _ in mixin_boards.ROWS] == [
        "Saturation", "Prefix cache", "Eviction and residency", "Preemption", "Requests and tenants", "Ranks",
        "Gateway", "kvcatch itself",
    ]  # fmt: skip


def test_utilisation_and_first_token_share_one_panel_with_the_watermark() -> None:
    _, first = panels()[0]
    text = " ".join(line.expr for line in first.lines)
    assert "kvcatch_kv_cache_blocks" in text
    assert "time_to_first_token" in text
    assert [line.right for line in first.lines] == [False, False, True]
    assert [line.dashed for line in first.lines] == [False, True, False]
    board = mixin_boards.boards("r")["kvcatch-overview.json"]
    panel = next(row for row in board["panels"] if row["title"] == first.title)
    assert [o["matcher"]["options"] for o in panel["fieldConfig"]["overrides"]] == [
        line.legend for line in first.lines
    ]


@pytest.mark.parametrize("name", ["kvcatch-overview.json", "kvcatch-fleet.json"])
def test_boards_are_whole(name: str) -> None:
    board = mixin_boards.boards("https://example.org/runbook")[name]
    variables = {row["name"] for row in board["templating"]["list"]}
    used = set(re.findall(r"\$(\w+)", json.dumps([row.get("targets") for row in board["panels"]])))
    assert used <= variables | {"__rate_interval"}
    ids = [row["id"] for row in board["panels"]]
    assert len(set(ids)) == len(ids)
    places: set[tuple[int, int]] = set()
    for row in board["panels"]:
        at = row["gridPos"]
        assert at["x"] + at["w"] <= 24
        cells = {(at["x"] + dx, at["y"] + dy) for dx in range(at["w"]) for dy in range(at["h"])}
        assert not cells & places, row["title"]
        places |= cells
        if row["type"] != "row":
            assert len(row["description"]) > 15
    assert set(json.loads(json.dumps(board))) == set(board)


def test_every_link_of_alerts_and_panels_leads_into_the_runbook() -> None:
    anchors = set(re.findall(r'<a id="([^"]+)">', runbook()))
    assert anchors == set(sections())
    assert {row.anchor for row in mixin_rules.ALERTS} <= anchors
    assert {panel.anchor for _, panel in panels() if panel.anchor} <= anchors


def test_every_section_of_the_runbook_is_complete() -> None:
    for anchor, row in sections().items():
        assert set(row) == {"name", "summary", "impact", "look", "fix", "escalate"}, anchor
        assert all(row[key] for key in row)
    named = {anchor.upper(): row["name"] for anchor, row in sections().items() if anchor.startswith("kvc")}
    assert named == {code: rule.name for code, rule in RULES.items()}


def test_alerts_say_what_to_do_and_link_to_it() -> None:
    (group,) = mixin_rules.alert_rules("https://example.org/runbook")["groups"]
    for rule in group["rules"]:
        assert rule["alert"].startswith("KVCatch")
        assert rule["labels"]["severity"] in ("critical", "warning", "info")
        notes = rule["annotations"]
        assert notes["runbook_url"].startswith("https://example.org/runbook#")
        assert notes["command"].startswith("kvcatch doctor {{ $labels.")
        assert "{{" not in notes["summary"]
        assert notes["summary"].endswith(".")
        code = rule["labels"].get("code")
        assert code is None or notes["runbook_url"].endswith(f"#{code.lower()}")


def test_rules_take_their_thresholds_from_the_table() -> None:
    text = " ".join(row.expr for row in mixin_rules.ALERTS)
    for value in (
        THRESHOLDS.usage_critical_ratio,
        THRESHOLDS.ttft_p99_critical_seconds,
        THRESHOLDS.waiting_warning,
    ):
        assert f"> {value}" in text


def test_the_files_are_plain_yaml_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "out"
    assert main(["mixin", str(folder)]) == 0
    listed = capsys.readouterr().out.split()
    assert sorted(listed) == sorted(str(folder / name) for name in contents("runbook.md"))
    for path in folder.glob("rules/*.yml"):
        assert yaml.safe_load(path.read_text())["groups"]
    kinds = [yaml.safe_load(path.read_text())["kind"] for path in sorted(folder.glob("kubernetes/*"))]
    assert kinds == ["ConfigMap", "PrometheusRule"]
    config = yaml.safe_load((folder / "kubernetes" / "dashboards-configmap.yaml").read_text())
    for name, text in config["data"].items():
        assert json.loads(text) == json.loads((folder / "dashboards" / name).read_text())
    assert main(["mixin", str(folder)]) == 2
    assert "exists" in capsys.readouterr().err
    assert main(["mixin", str(folder), "--force"]) == 0


def test_an_unwritable_folder_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    blocker = tmp_path / "file"
    blocker.touch()
    assert main(["mixin", str(blocker / "below")]) == 2
    assert str(blocker) in capsys.readouterr().err


WORDS = st.text(st.sampled_from("aZ09 :#-'\"{}[]&*!|>%@`,.?~\\/\t"), max_size=12) | st.sampled_from(
    ["yes", "NULL", "~", "1e3", "0x1f", "1:30", "- a", "a: b", "", " x ", "2026-01-02"]
)


@settings(max_examples=60)
@given(
    st.dictionaries(
        WORDS, WORDS | st.integers() | st.booleans() | st.none() | st.lists(WORDS, max_size=3), max_size=4
    )
)
def test_what_we_write_is_what_a_yaml_parser_reads(value: dict[str, Any]) -> None:
    nested = {"one": [value, {"two": value}], "three": value}
    assert yaml.safe_load(dump(nested)) == nested


def measured_file(folder: Path, name: str, ratio: object) -> str:
    document = {
        "safe_utilization_ratio": ratio,
        "measured_unix_seconds": 1_796_083_200,
        "config": {"num_blocks": "160\nkind: x"},
    }
    (folder / name).write_text(json.dumps(document))
    return str(folder / name)


def test_routers_get_the_lowest_measured_watermark_of_their_pool(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [measured_file(tmp_path, "a.json", 0.8129), measured_file(tmp_path, "b.json", 0.70592)]
    assert main(["mixin", str(tmp_path / "m"), "--watermark", files[0], "--watermark", files[1]]) == 0
    assert "llm-d.yaml" in capsys.readouterr().out
    texts = {path.name: path.read_text() for path in (tmp_path / "m" / "routers").iterdir()}
    for text in texts.values():
        assert (
            f"# 0.813 of the usable blocks, measured 2026-12-01, {files[0]} (num_blocks 160 kind: x)" in text
        )
        assert "lowest" in text
    llm_d, extension, scaler = (
        yaml.safe_load(texts[name])
        for name in ("llm-d.yaml", "gateway-api-inference-extension.yaml", "aibrix-autoscaler.yaml")
    )
    for config, detector in (
        (llm_d, llm_d["flowControl"]["saturationDetector"]),
        (extension, extension["saturationDetector"]),
    ):
        assert config["kind"] == "EndpointPickerConfig"
        by_name = {plugin["type"]: plugin for plugin in config["plugins"]}
        # Everything that is referred to exists.
        assert by_name[detector["pluginRef"]]["parameters"] == {"kvCacheUtilThreshold": 0.705}
        assert {one["pluginRef"] for one in config["schedulingProfiles"][0]["plugins"]} <= set(by_name)
    assert llm_d["apiVersion"] == "llm-d.ai/v1alpha1"
    assert llm_d["featureGates"] == ["flowControl"]
    assert extension["apiVersion"] == "inference.networking.x-k8s.io/v1alpha1"
    (source,) = scaler["spec"]["metricsSources"]
    # vLLM's own name of the used fraction; AIBrix wants the target as text.
    assert (source["targetMetric"], source["targetValue"]) == ("kv_cache_usage_perc", "0.705")
    assert "vllm:" + source["targetMetric"] in ENGINE_EXPOSED


@pytest.mark.parametrize("ratio", [None, 0, 1.2, "0.8", True])
def test_routers_need_a_measured_watermark(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], ratio: object
) -> None:
    path = measured_file(tmp_path, "a.json", ratio)
    assert main(["mixin", str(tmp_path / "m"), "--watermark", path]) == 2
    assert "no measured safe utilisation" in capsys.readouterr().err
    assert not (tmp_path / "m").exists()


def test_the_stored_watermark_counts_and_without_one_routers_are_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVCATCH_DIR", str(tmp_path))
    assert main(["mixin", str(tmp_path / "none")]) == 0
    assert "no watermark was measured yet" in capsys.readouterr().err
    assert not (tmp_path / "none" / "routers").exists()
    measured_file(tmp_path, "watermark.json", 0.9)
    assert main(["mixin", str(tmp_path / "m")]) == 0
    assert "kvCacheUtilThreshold: 0.9\n" in (tmp_path / "m" / "routers" / "llm-d.yaml").read_text()
