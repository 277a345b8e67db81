"""Sweeps of ``kvcatch simulate``: who runs them, the table they give, and the page with what is worth having."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvcatch.errors import KVCatchError, missing_extra

if TYPE_CHECKING:
    from kvcatch.simulator.workers import Workers


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of sweeps."""
    group = parser.add_argument_group("sweeps")
    group.add_argument("--jobs", type=int, default=os.cpu_count() or 1, metavar="N", help="runs at a time (default: all cores)")  # fmt: skip
    group.add_argument(
        "--processes", action="store_true", help="in processes of their own (default: threads, the kernels run beside each other)"
    )  # fmt: skip
    group.add_argument(
        "--ray", metavar="ADDRESS", help="on a Ray cluster: its address, auto, or local to start one here"
    )
    group.add_argument("--table", metavar="FILE", help="one row a run: .parquet or .csv")
    group.add_argument("--report", metavar="FILE.html", help="a page with the runs that no other run beats")


def workers_of(args: argparse.Namespace) -> Workers:
    """Who runs. Raises KVCatchError for options that exclude each other."""
    from kvcatch.simulator.workers import Workers

    if args.ray and args.processes:
        raise KVCatchError("--ray and --processes exclude each other.", "Choose one.")
    kind = "ray" if args.ray else "processes" if args.processes else "threads"
    return Workers(kind=kind, jobs=args.jobs, address=args.ray or "")


def flat(row: Mapping[str, Any]) -> dict[str, Any]:
    """A result as one row: parts of a summary get names of their own, tenants are left to ``--json``."""
    cells: dict[str, Any] = {}
    for name, value in row.items():
        if isinstance(value, Mapping):
            cells |= {f"{name.removesuffix('_seconds')}_{part}_seconds": one for part, one in value.items()}
        elif not isinstance(value, (list, tuple)):
            cells[name] = value
    return cells


def write(args: argparse.Namespace, documents: Sequence[Mapping[str, Any]]) -> None:
    """The table and the page that were asked for. Raises KVCatchError when a file cannot be written."""
    rows = [flat(row) for document in documents for row in document["results"]]
    if args.table:
        _table(args.table, rows)
        print(f"Wrote {args.table}: {len(rows)} runs", file=sys.stderr)
    if args.report:
        from kvcatch.views.html.pareto import page

        _save(args.report, page(rows).encode())
        print(f"Wrote {args.report}", file=sys.stderr)


def _table(path: str, rows: Sequence[Mapping[str, Any]]) -> None:
    names = list(dict.fromkeys(name for row in rows for name in row))
    if path.endswith(".csv"):
        import csv
        import io

        text = io.StringIO()
        writer = csv.DictWriter(text, names)
        writer.writeheader()
        writer.writerows(rows)
        _save(path, text.getvalue().encode())
        return
    if not path.endswith(".parquet"):
        raise KVCatchError(f"--table {path}: neither .parquet nor .csv.", "Name the file by its kind.")
    try:
        import pyarrow as arrow
        from pyarrow import parquet
    except ModuleNotFoundError:
        raise missing_extra("pyarrow", "parquet") from None
    table = arrow.table({name: [row.get(name) for row in rows] for name in names})
    sink = arrow.BufferOutputStream()
    parquet.write_table(table, sink)
    _save(path, sink.getvalue().to_pybytes())


def _save(path: str, data: bytes) -> None:
    try:
        with open(path, "wb") as file:
            file.write(data)
    except OSError as error:
        raise KVCatchError(f"cannot write {path}: {error.strerror}.", "Choose another place.") from error
