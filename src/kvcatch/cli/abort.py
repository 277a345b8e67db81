"""``kvcatch abort REQUEST``: end one request, free its blocks."""

from __future__ import annotations

import argparse
import json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``abort``."""
    parser.add_argument("request", metavar="REQUEST", help="request id, as 'kvcatch top' shows it")
    parser.add_argument("--json", action="store_true", help="one JSON document")


def run(args: argparse.Namespace) -> int:
    """Ask every gateway of this user; 0 when something was ended. Raises KVCatchError otherwise."""
    from kvcatch.gateway.operate import abort, aborted_lines

    ended = abort(args.request)
    if args.json:
        print(json.dumps({"schema_version": 1, "aborted": ended}))
    lines = aborted_lines(args.request, ended)
    if not args.json:
        print("\n".join(lines))
    return 0
