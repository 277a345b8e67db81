"""``kvcatch report``: one offline HTML file of a recording, verdict first."""

from __future__ import annotations

import argparse
import json
import os
import sys

from kvcatch.cli.spans import add_span_arguments, resolve_span


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``report``."""
    parser.add_argument(
        "target", nargs="?", metavar="F", help="capture or recorder (default: the newest recorder)"
    )
    parser.add_argument(
        "-o", "--output", metavar="HTML", help="default: kvcatch-report-<stem>.html; - for stdout"
    )
    parser.add_argument("--force", action="store_true", help="overwrite the file")
    parser.add_argument(
        "--json", action="store_true", help="print the report's content as one JSON document instead"
    )
    add_span_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Write the page. Raises KVCatchError."""
    from kvcatch.diagnosis import recording_path
    from kvcatch.errors import KVCatchError

    path = recording_path(args.target)
    if path is None and "://" not in args.target and not os.path.exists(args.target):
        raise KVCatchError(
            f"no such file or recorder: {args.target}.", 'Give a .kvcap file; "kvcatch ls" lists recorders.'
        )
    if path is None:
        raise KVCatchError(
            f"{args.target} is not a recording.",
            "A report needs a .kvcap file or a recorder (kvcatch ls); for metrics and logs use: kvcatch doctor",
        )
    output = args.output or f"kvcatch-report-{os.path.splitext(os.path.basename(path))[0]}.html"
    if not args.json and output != "-" and os.path.exists(output) and not args.force:
        raise KVCatchError(f"{output} exists.", "Overwrite it with --force, or name another with -o.")
    from kvcatch.views.html.content import gather

    report = gather(path, *resolve_span(args, _end(path, args)))
    if args.json:
        from kvcatch import __version__

        document = {"schema_version": 1, "kvcatch_version": __version__, **report.to_dict()}
        print(json.dumps(document, separators=(",", ":")))
        return 0
    from kvcatch.views.html.page import render

    page = render(report)
    if output == "-":
        sys.stdout.write(page)
        return 0
    try:
        with open(output, "w", encoding="utf-8") as file:
            file.write(page)
    except OSError as error:
        raise KVCatchError(
            f"cannot write {output}: {error.strerror}.", "Name another file with -o."
        ) from None
    print(report.verdict)
    print(f"Wrote {output}; open it in any browser, it loads nothing.")
    return 0


def _end(path: str, args: argparse.Namespace) -> float | None:
    """Unix seconds where the record ends, when a span was asked for."""
    if not any((args.span_from, args.span_to, args.span_last, args.span_around)):
        return None
    from kvcatch.store.columns import read_recording

    unix = read_recording(path).samples["unix_ns"]
    return float(unix[-1]) / 1e9 if len(unix) else None
