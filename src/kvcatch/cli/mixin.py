"""``kvcatch mixin DIR``: dashboards, rules, the runbook they link to, and configuration of routers."""

from __future__ import annotations

import argparse
import os
import sys


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``mixin``."""
    parser.add_argument(
        "folder", metavar="DIR", help="where to write rules/, dashboards/, kubernetes/, routers/, runbook.md"
    )
    parser.add_argument(
        "--runbook-url", default="runbook.md", metavar="URL",
        help="address of the runbook page that alerts and panels link to (default: runbook.md)",
    )  # fmt: skip
    parser.add_argument(
        "--watermark", action="append", default=[], metavar="FILE",
        help="what kvcatch watermark --json printed, for routers/; once per engine of the pool (default: the stored one)",
    )  # fmt: skip
    parser.add_argument("--force", action="store_true", help="overwrite files that are there")


def run(args: argparse.Namespace) -> int:
    """Write the files, then say how to check and use them."""
    from kvcatch.store.watermark import read_watermark, watermark_path
    from kvcatch.views.mixin import write
    from kvcatch.views.mixin_routers import Measured

    stored = watermark_path()
    files = args.watermark or ([stored] if os.path.exists(stored) else [])
    measured = []
    for path in files:
        document = read_watermark(path)
        measured.append(
            Measured(
                path, document["safe_utilization_ratio"], document.get("measured_unix_seconds", 0.0),
                document.get("config", {}),
            )
        )  # fmt: skip
    for path in write(args.folder, args.runbook_url.rstrip("#"), args.force, measured):
        print(path)
    if not measured:
        print(
            "kvcatch: no watermark was measured yet, routers/ is left out: kvcatch watermark --drive URL",
            file=sys.stderr,
        )
    print(
        f"Check: promtool check rules {args.folder}/rules/*.yml\n"
        "Next: add the rules to rule_files in prometheus.yml, and import the dashboards in Grafana.",
        file=sys.stderr,
    )
    return 0
