"""``kvcatch upgrade-check``: the same traffic on the old and the new engine, in ABBA order, then compared."""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import TYPE_CHECKING

from kvcatch.cli.replay import add_sending_arguments, options, read_target, send_workload
from kvcatch.errors import KVCatchError

if TYPE_CHECKING:
    from kvcatch.analysis.compare import Comparison
    from kvcatch.sources.replayed import Replayed


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``upgrade-check``."""
    parser.add_argument("target", metavar="CAPTURE|TRACE", help="a recording, a recorder, a pid, or a trace")
    parser.add_argument("--old", required=True, metavar="URL", help="the engine as it is")
    parser.add_argument("--new", required=True, metavar="URL", help="the engine as it is to be")
    parser.add_argument(
        "--rounds", type=int, default=1, metavar="N", help="how often old, new, new, old (default 1)"
    )
    parser.add_argument(
        "-o", "--output", metavar="DIR", help="folder of the results (default kvcatch-upgrade-check)"
    )
    parser.add_argument("--force", action="store_true", help="replace results that are there")
    add_sending_arguments(parser)
    parser.add_argument("--exit-zero", action="store_true", help="exit 0 also when something got worse")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--color", choices=("auto", "always", "never"), default="auto")


def run(args: argparse.Namespace) -> int:
    """Replay on both, compare, print; 1 when the new engine is worse, 130 after Ctrl-C. Raises KVCatchError."""
    if args.rounds < 1:
        raise KVCatchError(f"--rounds {args.rounds} is not positive.", "Give 1 or more.")
    workload = read_target(args)
    folder = args.output or "kvcatch-upgrade-check"
    os.makedirs(folder, exist_ok=True)
    # Old, new, new, old: what drifts with time (a warm machine, a neighbour) falls on both alike.
    order = [(side, 2 * turn + half) for turn in range(args.rounds) for side, half in
             (("old", 0), ("new", 0), ("new", 1), ("old", 1))]  # fmt: skip
    paths = {(side, number): os.path.join(folder, f"{side}-{number + 1}.jsonl") for side, number in order}
    if not args.force:
        for path in paths.values():
            if os.path.exists(path):
                raise KVCatchError(f"{path} exists.", "Choose another folder with -o, or add --force.")
    runs: dict[str, list[Replayed]] = {"old": [], "new": []}
    for place, (side, number) in enumerate(order, 1):
        url = args.old if side == "old" else args.new
        print(f"kvcatch: run {place} of {len(order)}: the {side} engine", file=sys.stderr)
        done = send_workload(workload, options(args, url), paths[side, number], overwrite=args.force)
        if done.tail is None or done.tail.interrupted:
            print(f"Wrote {paths[side, number]}: interrupted, nothing is compared", file=sys.stderr)
            return 130
        runs[side].append(done)
    comparison = judge(runs["old"], runs["new"])
    for note in dict.fromkeys(comparison.notes):
        print(f"kvcatch: {note}", file=sys.stderr)
    from kvcatch.cli.compare import document, text

    if args.json:
        results = {side: [one.target for one in side_runs] for side, side_runs in runs.items()}
        print(json.dumps(document(comparison) | {"results": results}, separators=(",", ":"), default=str))
    else:
        from kvcatch.cli.demo import use_color

        sys.stdout.write(text(comparison, color=use_color(args.color)))
    print(f"Wrote {folder}: {len(order)} runs", file=sys.stderr)
    worse = any(row.verdict == "worse" for row in comparison.metrics)
    return 1 if worse and not args.exit_zero else 0


def judge(old: list[Replayed], new: list[Replayed]) -> Comparison:
    """All runs of the new engine against all of the old one; runs of one engine among each other are the noise."""
    from kvcatch.analysis.compare import compare, spread
    from kvcatch.analysis.compare_replay import merged, replay_side
    from kvcatch.analysis.compare_stats import Noise

    noise: dict[str, Noise] = {}
    for runs in (old, new):
        measured = spread(replay_side(runs[0]), [replay_side(one) for one in runs[1:]])
        for name, one in measured.items():
            noise[name] = one.or_wider(noise.get(name))
    sides = [
        replay_side(merged(runs, f"{name} ({runs[0].head.engine_version or 'n/a'} on {runs[0].head.url})"))
        for name, runs in (("old", old), ("new", new))
    ]
    return compare(sides[0], sides[1], noise=noise)
