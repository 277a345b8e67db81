"""``kvcatch prefix``: where prefix hits are lost, what a fix would win."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvcatch.cli.spans import add_span_arguments, resolve_span
from kvcatch.errors import KVCatchError
from kvcatch.units import human_count, human_ratio, human_seconds, parse_duration

if TYPE_CHECKING:
    from kvcatch.analysis.prefix import PrefixReport

SCHEMA_VERSION = 1
#: causes that a change could avoid
AVOIDABLE = ("diverged", "misaligned", "evicted", "order", "in_flight", "salt", "other_engine", "caching_off")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``prefix``."""
    parser.add_argument(
        "targets",
        nargs="*",
        metavar="TARGET",
        help="capture or recorder; request log (JSON lines with messages, token ids or block ids); two request bodies",
    )
    parser.add_argument(
        "--num-blocks", type=int, metavar="N", help="pool of a log, as vLLM counts (default: no limit)"
    )
    parser.add_argument(
        "--block-size", type=int, metavar="N", help="tokens a block (default: the target's own, or 16)"
    )
    parser.add_argument(
        "--hit-unit",
        type=int,
        metavar="N",
        help="tokens between places where a hit can end, of a log (several KV groups: a multiple of the block)",
    )
    parser.add_argument(
        "--drafts",
        action="store_true",
        help="EAGLE or MTP drafts, of a log: the last matched block is computed again",
    )
    parser.add_argument(
        "--tokenizer", metavar="FILE", help="tokenizer.json or the model's folder, for messages and text"
    )
    parser.add_argument(
        "--window",
        default="60s",
        metavar="DURATION",
        help="requests that may be grouped for 'order' (default 60s)",
    )
    parser.add_argument("--tenant-key", default="", metavar="FIELD", help="field that names the tenant")
    parser.add_argument(
        "--prefill-rate",
        type=float,
        metavar="TOKENS/S",
        help="to estimate TTFT of a log (a recording tells it)",
    )
    parser.add_argument(
        "--fail-on",
        metavar="CAUSE=PERCENT,...",
        help=f"exit 1 when a cause loses more of all prompt tokens; causes: {', '.join(AVOIDABLE)}, or 'avoidable'",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    add_span_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Explain, print, and return 1 when ``--fail-on`` says so. Raises KVCatchError."""
    limits = parse_limits(args.fail_on)
    reports = [_report(group, args) for group in _grouped(args.targets)]
    if args.json:
        from kvcatch import __version__

        document = {
            "schema_version": SCHEMA_VERSION,
            "kvcatch_version": __version__,
            "targets": [report.to_dict() for report in reports],
        }
        print(json.dumps(document, separators=(",", ":")))
    else:
        print("\n\n".join(text(report) for report in reports))
    broken = [(report, name) for report in reports for name in exceeded(report, limits)]
    for report, name in broken:
        share = lost_share(report, name)
        print(
            f"kvcatch: {report.target}: {name} loses {human_ratio(share)} of all prompt tokens",
            file=sys.stderr,
        )
    return 1 if broken else 0


def parse_limits(words: str | None) -> dict[str, float]:
    """Cause -> ratio from ``diverged=5%,evicted=0.1``. Raises KVCatchError."""
    limits: dict[str, float] = {}
    for word in words.split(",") if words else ():
        name, _, value = word.strip().partition("=")
        name = name.replace("-", "_")
        if name not in (*AVOIDABLE, "avoidable"):
            raise KVCatchError(
                f"--fail-on: no such cause: {name!r}.", f"Known: {', '.join(AVOIDABLE)}, avoidable."
            )
        try:
            limits[name] = float(value[:-1]) / 100 if value.endswith("%") else float(value or 0)
        except ValueError:
            raise KVCatchError(
                f"--fail-on: not a share: {value!r}.", "Write for example diverged=5%."
            ) from None
    return limits


def lost_share(report: PrefixReport, name: str) -> float:
    """Share of all prompt tokens lost to a cause, or to all avoidable ones."""
    names: Sequence[str] = AVOIDABLE if name == "avoidable" else (name,)
    return sum(report.tokens(one) for one in names) / report.queried_tokens if report.queried_tokens else 0.0


def exceeded(report: PrefixReport, limits: dict[str, float]) -> list[str]:
    """The limits that a report breaks."""
    return [name for name, most in limits.items() if lost_share(report, name) > most]


def _grouped(targets: Sequence[str]) -> list[list[str | None]]:
    """Two request bodies are compared with each other; everything else stands alone."""
    if len(targets) == 2 and all(_is_body(target) for target in targets):
        return [list(targets)]
    return [[target] for target in targets] or [[None]]


def _is_body(path: str) -> bool:
    """A file with one JSON object that has a prompt."""
    if not os.path.isfile(path):
        return False
    with open(path, "rb") as file:
        start = file.read(1 << 24)
    try:
        body = json.loads(start)
    except ValueError:
        return False
    return isinstance(body, dict) and ("messages" in body or "prompt" in body)


def _report(group: Sequence[str | None], args: argparse.Namespace) -> PrefixReport:
    from kvcatch.diagnosis import recording_path

    window = parse_duration(args.window)
    if len(group) == 2:
        records = [json.loads(_read(str(path))) for path in group]
        names = [os.path.basename(str(path)) for path in group]
        records = [{"request_id": name, **record} for name, record in zip(names, records, strict=True)]
        return _words(records, " and ".join(names), "bodies", args, window)
    target = group[0]
    path = recording_path(target)
    if path is not None:
        from kvcatch.analysis.prefix import explain
        from kvcatch.analysis.prefix_capture import lookups
        from kvcatch.store.columns import read_recording

        if target is None:
            print(f"kvcatch: looking at {path}", file=sys.stderr)
        recording = read_recording(path, chains=True)
        unix = recording.samples["unix_ns"]
        start, stop = resolve_span(args, float(unix[-1]) / 1e9 if len(unix) else None)
        look = lookups(recording, window_seconds=window, start=start, stop=stop)
        report, _ = explain(look, path, "capture")
        return report
    if target is None or not os.path.isfile(target):
        raise KVCatchError(f"no such target: {target!r}.", "Give a capture, a recorder or a request log.")
    from kvcatch.analysis.prefix_log import read_records
    from kvcatch.analysis.prefix_words import has_words

    records = read_records(target)
    if has_words(records[0]):
        return _words(records, target, "log", args, window)
    from kvcatch.analysis.prefix import explain
    from kvcatch.analysis.prefix_log import from_log

    look = from_log(
        target, block_size=args.block_size, usable=_usable(args), window_seconds=window, tenant_key=args.tenant_key
    )  # fmt: skip
    look.seconds_per_token = 1 / args.prefill_rate if args.prefill_rate else None
    look.limit(args.hit_unit, args.drafts)
    report, _ = explain(look, target, "log")
    return report


def _words(
    records: list[dict[str, Any]], target: str, source: str, args: argparse.Namespace, window: float
) -> PrefixReport:
    from kvcatch.analysis.prefix_log import in_order
    from kvcatch.analysis.prefix_words import explain_words, read_words, tokenizer

    encode, template = tokenizer(args.tokenizer) if args.tokenizer else (None, None)
    records = in_order(records) if source == "log" else records
    return explain_words(
        records, read_words(records, encode, template), target, source=source, block_size=args.block_size,
        usable=_usable(args), window_seconds=window, tenant_key=args.tenant_key,
        seconds_per_token=1 / args.prefill_rate if args.prefill_rate else None, unit=args.hit_unit, drafts=args.drafts,
    )  # fmt: skip


def _read(path: str) -> str:
    with open(path, encoding="utf-8") as file:
        return file.read()


def _usable(args: argparse.Namespace) -> int | None:
    if args.num_blocks is None:
        return None
    if args.num_blocks < 2:
        raise KVCatchError(f"--num-blocks {args.num_blocks} leaves no usable block.", "Give 2 or more.")
    return int(args.num_blocks) - 1


def text(report: PrefixReport) -> str:
    """The report for people."""
    from kvcatch.views.palette import clean

    pool = f"{human_count(report.num_blocks)} blocks" if report.num_blocks else "no limit of blocks"
    lines = [
        f"{clean(report.target)}: {human_count(report.requests)} requests, blocks of {report.block_size} tokens, {pool}"
        + (f", hits in steps of {human_count(report.unit_tokens)}" if report.unit_tokens else "")
        + (
            f", {human_count(report.given_back_tokens)} of a match given back"
            if report.given_back_tokens
            else ""
        ),
        (
            f"  looked up {human_count(report.queried_tokens)} tokens, hit {human_count(report.hit_tokens)} "
            f"({human_ratio(report.hit_ratio)}, {report.hits}), missed {human_count(report.missed_tokens)}"
        ),
        "",
        f"  {'cause':<13} {'tokens':>12} {'share':>7} {'requests':>9}",
    ]
    for row in report.causes:
        shown = human_count(row.tokens)
        lines.append(
            f"  {row.cause:<13} {shown:>12} {human_ratio(row.share_ratio):>7} {human_count(row.requests):>9}  {row.meaning}"
        )
        if row.up_to_tokens:
            lines.append(f"  {'':<13} up to {human_count(row.up_to_tokens)} tokens, of which the rest counts as first seen here: "
                         "a recording knows whole blocks only")  # fmt: skip
    lines += _details(report)
    for note in report.notes:
        lines.append(f"  note: {clean(note)}")
    return "\n".join(lines)


def _details(report: PrefixReport) -> list[str]:
    from kvcatch.views.palette import clean

    lines: list[str] = []
    if report.gains:
        lines += ["", "  room that would have kept the evicted ones:"]
        for gain in report.gains:
            lines.append(f"    {human_count(gain.num_blocks):>10} blocks (+{human_count(gain.more_blocks)}) win "
                         f"{human_count(gain.won_tokens)} tokens")  # fmt: skip
    if report.divergences:
        lines += ["", "  where shared beginnings end:"]
        # Single requests that go their own way late are no pattern.
        for place in [
            one for one in report.divergences if one.requests > 1 or one.what
        ] or report.divergences[:3]:
            where = f"block {place.block}, token {human_count(place.token)}" + (
                f", {place.where}" if place.where else ""
            )
            lines.append(
                f"    {where}: {human_count(place.requests)} requests, {human_count(place.lost_tokens)} tokens behind it"
            )
            if place.what:
                lines.append(f"      {place.what}: {clean(repr(place.before))} became {clean(repr(place.after))} "
                             f"({clean(str(place.nearest))} -> {clean(str(place.example))})")  # fmt: skip
            elif place.nearest:
                lines.append(
                    f"      last {clean(str(place.example))}, nearest earlier {clean(place.nearest)}"
                )
    for rewrite in report.rewrites:
        lines += ["", f"  rewrite: {clean(rewrite.what)}"]
        lines.append(f"    hit {human_count(rewrite.hit_tokens_before)} -> {human_count(rewrite.hit_tokens_after)} tokens "
                     f"(+{human_count(rewrite.won_tokens)}, {human_count(rewrite.won_blocks)} blocks) in "
                     f"{human_count(rewrite.requests)} requests")  # fmt: skip
        if rewrite.ttft_seconds_per_request is not None:
            lines.append(f"    about {human_seconds(rewrite.ttft_seconds_per_request)} less TTFT per request")
        if rewrite.example:
            lines.append(f"    {clean(rewrite.example)}")
    if report.tenants:
        lines += ["", "  by tenant:"]
        for group in report.tenants[:10]:
            worst = max(group.causes.items(), key=lambda item: item[1], default=("", 0))
            ratio = group.hit_tokens / group.queried_tokens if group.queried_tokens else None
            lines.append(f"    {clean(group.tenant):<16} {human_count(group.queried_tokens):>12} looked up, {human_ratio(ratio)} hit, "
                         f"most lost: {worst[0]} {human_count(worst[1])}")  # fmt: skip
    if report.saved is not None and report.saved.prefill_tokens:
        seconds = (
            f", about {human_seconds(report.saved.seconds)} of prefill"
            if report.saved.seconds is not None
            else ""
        )
        lines += ["", (f"  caching saved {human_count(report.saved.prefill_tokens)} prompt tokens "
                  f"({human_count(report.saved.blocks)} blocks){seconds}")]  # fmt: skip
    return lines
