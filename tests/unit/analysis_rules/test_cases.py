"""Real cases of public threads: the right code, its numbers and remedy, and silence of the wrong codes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import rule_pages as pages

from kvcatch.analysis.doctor import Diagnosis, diagnose
from kvcatch.analysis.evidence import from_scrape
from kvcatch.analysis.evidence_log import from_log
from kvcatch.sources.failures import parse_failures
from kvcatch.sources.logs import LogCapture

CASES: list[dict[str, Any]] = json.loads(
    (Path(__file__).parents[2] / "data" / "cases" / "cases.json").read_text()
)
MOMENT = 1_764_439_200.0


def look(case: dict[str, Any]) -> Diagnosis:
    if "log" in case:
        lines = case["log"]
        return diagnose(from_log(LogCapture("log", lines, MOMENT), parse_failures(lines, year=2025)))
    return diagnose(from_scrape(pages.capture(case["pages"])))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"].split()[0] + " " + case["name"][-30:])
def test_case(case):
    diagnosis = look(case)
    codes = [finding.code for finding in diagnosis.findings if finding.severity != "info"]
    every = [finding.code for finding in diagnosis.findings]
    assert set(case["codes"]) <= set(every), (every, diagnosis.findings)
    assert not set(case["absent"]) & set(every), diagnosis.findings
    # Nothing else may be more than a note.
    assert set(codes) <= set(case["codes"]), diagnosis.findings
    said = json.dumps([finding.to_dict() for finding in diagnosis.findings if finding.code in case["codes"]])
    for words in case["words"]:
        assert words in said
