"""``kvcatch doctor``: what is wrong, with evidence, cause and remedy."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvcatch.cli.spans import add_span_arguments, resolve_span

if TYPE_CHECKING:
    from kvcatch.analysis.doctor import Diagnosis
    from kvcatch.analysis.evidence import Case
    from kvcatch.results import Finding

SCHEMA_VERSION = 1
_COLOR = {"critical": "1;31", "warning": "1;33", "info": "1;34"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``doctor``."""
    parser.add_argument(
        "targets",
        nargs="*",
        metavar="TARGET",
        help="capture, recorder, log, /metrics URL or page, prometheus:URL; several are checked against each other",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument(
        "--fail-on",
        choices=("info", "warning", "critical"),
        default="warning",
        help="exit 1 from this severity on",
    )
    parser.add_argument("--exit-zero", action="store_true", help="exit 0 whatever is found")
    parser.add_argument("--no-prefix", action="store_true", help="leave out the walk over prefix chains")
    parser.add_argument("--color", choices=("auto", "always", "never"), default="auto")
    add_span_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Look, print, and return 1 when something at or above ``--fail-on`` was found. Raises KVCatchError."""
    from kvcatch.analysis.doctor import diagnose
    from kvcatch.analysis.rules import ORDER
    from kvcatch.diagnosis import closing, open_cases, recording_path

    cases: list[Case] = []
    for target in args.targets or [None]:
        if target is None:
            print(f"kvcatch: looking at {recording_path(None)}", file=sys.stderr)
        cases += open_cases(target, lambda end: resolve_span(args, end), chains=not args.no_prefix)
    extra = [] if args.no_prefix else _prefix_findings(cases)
    diagnosis = diagnose(cases, extra=extra)
    for note in diagnosis.notes:
        print(f"kvcatch: {note}", file=sys.stderr)
    if args.json:
        print(json.dumps(document(diagnosis), separators=(",", ":")))
    else:
        from kvcatch.cli.demo import use_color

        sys.stdout.write(text(diagnosis, color=use_color(args.color)))
    if args.verbose:
        reasons: dict[str, list[str]] = {}
        for code, needs in sorted(diagnosis.silent.items()):
            reasons.setdefault(needs, []).append(code)
        for needs, codes in reasons.items():
            print(f"kvcatch: not looked for: {', '.join(codes)}; needs {needs}", file=sys.stderr)
    print(f"kvcatch: looked at {closing(cases)}", file=sys.stderr)
    worst = diagnosis.worst()
    failed = worst is not None and ORDER[worst] <= ORDER[args.fail_on]
    return 1 if failed and not args.exit_zero else 0


def _prefix_findings(cases: Sequence[Case]) -> list[Finding]:
    """Findings of the chains of recordings; none from weaker targets."""
    from kvcatch.analysis.prefix_findings import from_recording

    return [
        finding
        for case in cases
        if case.recording is not None
        for finding in from_recording(case.recording, *case.span)
    ]


def document(diagnosis: Diagnosis) -> dict[str, object]:
    """What ``--json`` prints."""
    from kvcatch import __version__

    return {
        "schema_version": SCHEMA_VERSION,
        "kvcatch_version": __version__,
        "targets": list(diagnosis.targets),
        "findings": [finding.to_dict() for finding in diagnosis.findings],
        "not_checked": [{"code": code, "needs": needs} for code, needs in sorted(diagnosis.silent.items())],
        "notes": list(diagnosis.notes),
    }


def text(diagnosis: Diagnosis, *, color: bool = False) -> str:
    """The findings for people, the worst first."""
    if not diagnosis.findings:
        return f"Nothing found in {', '.join(diagnosis.targets)}.\n"
    from kvcatch.analysis.rules import RULES
    from kvcatch.views.palette import clean

    lines = []
    for finding in diagnosis.findings:
        rule = RULES[finding.code]
        severity = f"\x1b[{_COLOR[finding.severity]}m{finding.severity}\x1b[0m" if color else finding.severity
        lines.append(f"{severity} {finding.code} {rule.name}: {clean(finding.title)}")
        if finding.unix_seconds:
            lines.append(f"  when    {moment(finding.unix_seconds)}")
        for row in finding.evidence:
            lines.append(
                f"  {'seen' if row is finding.evidence[0] else '':<7} {clean(_said(row.text, row.value, row.unit))}"
            )
        lines += [
            f"  cause   {finding.cause}",
            f"  do      {clean(finding.remedy)}",
            f"  more    docs/runbook.md#{finding.anchor}",
            "",
        ]
    return "\n".join(lines[:-1]) + "\n"


def _said(text: str, value: float | None, unit: str | None) -> str:
    """Evidence whose text has no number yet gets its value behind it."""
    if value is None or any(character.isdigit() for character in text):
        return text
    shown = f"{100 * value:.1f}%" if unit == "ratio" else f"{value:,.6g}" + (f" {unit}" if unit else "")
    return f"{text}: {shown}"


def moment(unix_seconds: float) -> str:
    """Local wall-clock time with the zone."""
    return time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(unix_seconds)).strip()
