"""``kvcatch compare``: what differs between two runs beyond noise, and why."""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvcatch.analysis.compare import Comparison, Metric
    from kvcatch.analysis.compare_sides import Side

SCHEMA_VERSION = 1
_HEAD = 1 << 16


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``compare``."""
    parser.add_argument(
        "a",
        metavar="A",
        help="the first run: capture, recorder, metrics page or URL, prometheus:URL, bench JSON, replay results",
    )
    parser.add_argument("b", metavar="B", help="the second run")
    parser.add_argument(
        "--repeat",
        action="append",
        default=[],
        metavar="FILE",
        help="another run of A's configuration; the spread between them is the noise floor (may be repeated)",
    )
    parser.add_argument(
        "--skip", type=int, metavar="N", help="requests left out as warm-up (default 5%%, at most 8)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--exit-zero", action="store_true", help="exit 0 also when something got worse")
    parser.add_argument("--color", choices=("auto", "always", "never"), default="auto")  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Compare, print, and return 1 when a metric got worse. Raises KVCatchError."""
    from kvcatch.analysis.compare import compare
    from kvcatch.errors import KVCatchError

    if args.skip is not None and args.skip < 0:
        raise KVCatchError(f"--skip {args.skip} is negative.", "Give the number of requests to leave out.")
    comparison = compare(
        open_side(args.a), open_side(args.b), repeats=[open_side(one) for one in args.repeat], skip=args.skip
    )
    for note in dict.fromkeys(comparison.notes):
        print(f"kvcatch: {note}", file=sys.stderr)
    if args.json:
        print(json.dumps(document(comparison), separators=(",", ":"), default=str))
    else:
        from kvcatch.cli.demo import use_color

        sys.stdout.write(text(comparison, color=use_color(args.color)))
    worse = any(row.verdict == "worse" for row in comparison.metrics)
    return 1 if worse and not args.exit_zero else 0


def open_side(target: str) -> Side:
    """One run of any kind. Raises KVCatchError."""
    from kvcatch.analysis.compare import recording_side
    from kvcatch.analysis.compare_replay import replay_side
    from kvcatch.analysis.compare_sides import from_bench, from_pages
    from kvcatch.diagnosis import open_cases, recording_path
    from kvcatch.errors import KVCatchError
    from kvcatch.sources.replayed import read_replayed

    path = recording_path(target)
    if path is not None:
        from kvcatch.store.columns import read_recording

        return recording_side(target, read_recording(path))
    replayed = read_replayed(target)
    if replayed is not None:
        return replay_side(replayed)
    bench = _bench(target)
    if bench is not None:
        return from_bench(target, bench)
    cases = open_cases(target)
    if len(cases) != 1:
        raise KVCatchError(
            f"{target}: {len(cases)} engines.",
            "Compare one engine at a time: select it with prometheus:URL?engine=0.",
        )
    if cases[0].pages is None:
        raise KVCatchError(
            f"{target}: {cases[0].kind} cannot be compared.", "Give captures, pages or bench results."
        )
    return from_pages(cases[0])


def _bench(target: str) -> dict[str, object] | None:
    """The result of a bench run, None when the target is something else. Raises KVCatchError for broken JSON."""
    from kvcatch.errors import KVCatchError

    if not os.path.isfile(target):
        return None
    with open(target, encoding="utf-8", errors="replace") as file:
        if not file.read(64).lstrip().startswith("{"):
            return None
        file.seek(0)
        try:
            loaded = json.load(file)
        except ValueError as error:
            file.seek(0)
            lines = [line for line in file if line.strip()]
            try:
                loaded = json.loads(lines[-1])  # --append-result writes one document a line
            except ValueError:
                raise KVCatchError(
                    f"{target}: not JSON ({error}).", "Give the file of vllm bench serve."
                ) from None
    return loaded if isinstance(loaded, dict) else None


def document(comparison: Comparison) -> dict[str, object]:
    """What ``--json`` prints."""
    from kvcatch import __version__

    return {"schema_version": SCHEMA_VERSION, "kvcatch_version": __version__, **comparison.to_dict()}


_SAYS = {
    "worse": "worse", "better": "better", "mixed": "mixed: some better, some worse",
    "equal": "no difference", "inconclusive": "inconclusive",
}  # fmt: skip
_COLORS = {"worse": "1;31", "better": "32", "inconclusive": "33"}


def text(comparison: Comparison, *, color: bool = False) -> str:
    """The comparison for people: drift, table, causes."""
    from kvcatch.analysis.compare_causes import number
    from kvcatch.views.palette import clean

    def paint(word: str, pad: int = 0) -> str:
        code = _COLORS.get(word) if color else None
        return (f"\x1b[{code}m{word}\x1b[0m" if code else word) + " " * max(0, pad - len(word))

    lines = [f"{_SAYS[comparison.verdict]}: {clean(comparison.b)} against {clean(comparison.a)}"]
    if comparison.requests is not None:
        how = "the same requests" if comparison.paired else "as many requests of each"
        lines.append(f"aligned by requests served: {comparison.requests:,}, {how}")
    untold = [row for row in comparison.metrics if row.better and row.verdict == "inconclusive"]
    if untold and comparison.verdict in ("equal", "inconclusive"):
        names = ", ".join(
            f"{row.name} (less than {abs(high / row.a):.0%})"
            if (high := _widest(row)) and row.a
            else row.name
            for row in untold
        )
        lines.append(f"could not be told: {names}")
    lines.append("")
    if comparison.drift:
        lines.append(f"{'setting':<38} {'A':>18} {'B':>18}  to restore A")
        for row in comparison.drift:
            shown = [_short(clean(str(value)), 18) for value in (row.a, row.b)]
            lines.append(
                f"{_short(row.name, 38):<38} {shown[0]:>18} {shown[1]:>18}  {row.restore or ''}".rstrip()
            )
    else:
        lines.append("no setting differs" if comparison.metric("kv_capacity_tokens") else "settings n/a")
    for word, only in (("A", comparison.only_a), ("B", comparison.only_b)):
        if only:
            shown_only = ", ".join(f"{name}={_short(clean(str(value)), 18)}" for name, value in only.items())
            lines.append(f"only {word} has: {shown_only}")
    lines += ["", f"{'metric':<28} {'A':>11} {'B':>11} {'change':>9} {'interval':>23} {'floor':>9}  verdict"]
    for one in comparison.metrics:
        change = "n/a" if one.relative_difference is None else f"{100 * one.relative_difference:+.1f}%"
        interval = "n/a"
        if one.low is not None and one.high is not None:
            interval = f"{number(one.low, one.unit)} .. {number(one.high, one.unit)}"
        lines.append(
            f"{one.name:<28} {number(one.a, one.unit):>11} {number(one.b, one.unit):>11} {change:>9} {interval:>23} "
            f"{number(one.floor, one.unit):>9}  {paint(one.verdict)}"
        )
    for finding in comparison.findings:
        lines += [
            "",
            f"{finding.severity} {finding.code}: {clean(finding.title)}",
            f"  cause   {clean(finding.cause)}",
        ]
        lines.append(f"  do      {clean(finding.remedy)}")
    return "\n".join(lines) + "\n"


def _widest(row: Metric) -> float | None:
    """The largest difference that the interval leaves possible."""
    return None if row.low is None or row.high is None else max(abs(row.low), abs(row.high))


def _short(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"
