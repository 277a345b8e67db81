"""The table of findings: complete, consistent with the runbook, and with thresholds that exist."""

from __future__ import annotations

import re
from pathlib import Path

from kvcatch.analysis.doctor import CHECKS
from kvcatch.analysis.rules import ORDER, RULES
from kvcatch.analysis.thresholds import LIMITS, Limits
from kvcatch.metrics import THRESHOLDS

RUNBOOK = (Path(__file__).parents[3] / "docs" / "runbook.md").read_text()


def test_every_code_has_its_section_of_the_runbook_under_its_name():
    sections = dict(re.findall(r"## (KVC\d+) ([\w-]+)", RUNBOOK))
    assert {code: rule.name for code, rule in RULES.items()} == sections
    for rule in RULES.values():
        assert f'id="{rule.anchor}"' in RUNBOOK


def test_rows_are_complete():
    for rule in RULES.values():
        assert rule.severity in ORDER
        assert rule.summary.endswith(".")
        assert rule.cause.endswith(".")
        assert rule.remedy
        assert rule.needs
        assert set(rule.thresholds) <= set(Limits.__struct_fields__)


def test_every_rule_of_doctor_has_a_check():
    checked = {code for codes, _, _ in CHECKS for code in codes} | {"KVC209", "KVC305"}
    assert {code for code, rule in RULES.items() if rule.verb == "doctor"} == checked


def test_thresholds_are_those_of_boards_and_alerts():
    assert LIMITS.watermark_ratio == THRESHOLDS.assumed_watermark_ratio
    assert LIMITS.full_ratio == THRESHOLDS.usage_critical_ratio
    assert LIMITS.recomputed_share == THRESHOLDS.recomputed_share_warning
    assert LIMITS.tenant_share == THRESHOLDS.tenant_share_warning_ratio
    assert LIMITS.fragmentation_ratio == THRESHOLDS.fragmentation_warning_ratio
    assert LIMITS.hit_ratio == THRESHOLDS.hit_ratio_warning
