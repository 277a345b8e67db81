"""``kvcatch hold TENANT``: refuse a tenant's new requests for a while."""

from __future__ import annotations

import argparse
import json

from kvcatch.errors import KVCatchError
from kvcatch.units import parse_duration


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``hold``."""
    parser.add_argument("tenant", metavar="TENANT")
    parser.add_argument(
        "--for", dest="span", default="10m", metavar="TIME", help="how long (10m); 0 ends a hold"
    )
    parser.add_argument("--json", action="store_true", help="one JSON document")


def run(args: argparse.Namespace) -> int:
    """Tell every gateway of this user. Raises KVCatchError when none runs."""
    from kvcatch.gateway.operate import held_line, hold

    seconds = parse_duration(args.span)
    if seconds > 30 * 86400:
        raise KVCatchError(
            f"--for {args.span}: longer than 30 days.", "Write it into the policy file instead."
        )
    answers = hold(args.tenant, seconds)
    running = sum(answer["in_flight"] for answer in answers)
    if args.json:
        print(
            json.dumps({"schema_version": 1, "tenant": args.tenant, "seconds": seconds, "in_flight": running})
        )
    else:
        print(held_line(args.tenant, seconds, answers))
    return 0
