"""``kvcatch mixin DIR``: dashboards, recording and alert rules, and the runbook they link to."""

from __future__ import annotations

import argparse
import sys


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``mixin``."""
    parser.add_argument(
        "folder", metavar="DIR", help="where to write rules/, dashboards/, kubernetes/, runbook.md"
    )
    parser.add_argument(
        "--runbook-url", default="runbook.md", metavar="URL",
        help="address of the runbook page that alerts and panels link to (default: runbook.md)",
    )  # fmt: skip
    parser.add_argument("--force", action="store_true", help="overwrite files that are there")


def run(args: argparse.Namespace) -> int:
    """Write the files, then say how to check and use them."""
    from kvcatch.views.mixin import write

    for path in write(args.folder, args.runbook_url.rstrip("#"), args.force):
        print(path)
    print(
        f"Check: promtool check rules {args.folder}/rules/*.yml\n"
        "Next: add the rules to rule_files in prometheus.yml, and import the dashboards in Grafana.",
        file=sys.stderr,
    )
    return 0
