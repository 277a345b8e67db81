"""``kvcatch abort REQUEST``: end one request, free its blocks."""

from __future__ import annotations

import argparse
import json

from kvcatch.errors import KVCatchError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``abort``."""
    parser.add_argument("request", metavar="REQUEST", help="request id, as 'kvcatch top' shows it")
    parser.add_argument("--json", action="store_true", help="one JSON document")


def run(args: argparse.Namespace) -> int:
    """Ask every gateway of this user; 0 when something was ended. Raises KVCatchError otherwise."""
    from kvcatch.gateway.operate import abort

    ended = abort(args.request)
    if args.json:
        print(json.dumps({"schema_version": 1, "aborted": ended}))
    else:
        for row in ended:
            tenant = f", tenant {row['tenant']}" if row.get("tenant") else ""
            print(f"aborted {row['request_id']} ({row['state']}{tenant})")
    if not ended:
        raise KVCatchError(f"{args.request}: no such request in flight.", "'kvcatch top' lists them.")
    return 0
