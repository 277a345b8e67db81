"""What the recorder's hooks rely on, read from a vLLM release's source without importing it.

python tests/contract/signatures.py $(python tools/old_engines.py) > tests/contract/signatures.json
"""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

#: class -> its module; the attributes of KVCacheCoordinator include those of its subclasses' common base
CLASSES = {
    "Scheduler": "vllm.v1.core.sched.scheduler",
    "BlockPool": "vllm.v1.core.block_pool",
    "KVCacheManager": "vllm.v1.core.kv_cache_manager",
    "KVCacheCoordinator": "vllm.v1.core.kv_cache_coordinator",
    "FreeKVCacheBlockQueue": "vllm.v1.core.kv_cache_utils",
    "KVCacheBlock": "vllm.v1.core.kv_cache_utils",
    "SchedulerOutput": "vllm.v1.core.sched.output",
    "CachedRequestData": "vllm.v1.core.sched.output",
    "NewRequestData": "vllm.v1.core.sched.output",
    "Request": "vllm.v1.request",
    "WorkerWrapperBase": "vllm.v1.worker.worker_base",
}
#: attribute path step -> class that it leads to
LEADS = {
    ("Scheduler", "kv_cache_manager"): "KVCacheManager",
    ("KVCacheManager", "block_pool"): "BlockPool",
    ("KVCacheManager", "coordinator"): "KVCacheCoordinator",
    ("BlockPool", "free_block_queue"): "FreeKVCacheBlockQueue",
}

Table = dict[str, dict[str, Any]]
Hooked = Sequence[tuple[str, str, str, tuple[str, ...]]]


def table(folder: Path) -> Table:
    """Methods with their arguments, and attributes, of the classes above in one unpacked release."""
    found: Table = {}
    for name, module in CLASSES.items():
        path = folder.joinpath(*module.split(".")).with_suffix(".py")
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and node.name == name:
                found[name] = of_class(node)
    return found


def of_class(node: ast.ClassDef) -> dict[str, Any]:
    """{"methods": {name: arguments after self}, "attributes": names assigned on self or declared in the body}."""
    methods: dict[str, list[str]] = {}
    attributes: set[str] = set()
    for item in node.body:
        if isinstance(item, ast.FunctionDef):
            arguments = [argument.arg for argument in (*item.args.posonlyargs, *item.args.args)]
            methods[item.name] = arguments[1:]
            if any(getattr(mark, "id", "") == "property" for mark in item.decorator_list):
                attributes.add(item.name)
        elif isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
            attributes.add(item.target.id)
    for item in ast.walk(node):
        stored = isinstance(item, ast.Attribute) and isinstance(item.ctx, ast.Store)
        if stored and isinstance(item.value, ast.Name) and item.value.id == "self":
            attributes.add(item.attr)
    return {"methods": methods, "attributes": sorted(attributes)}


def first_moved(release: Table, hooked: Hooked, read: Iterable[str]) -> str | None:
    """The first hooked method, first argument or read attribute that a release lacks, in words; None if all are there."""
    for _, owner, method, arguments in hooked:
        methods = release[owner]["methods"]
        if method not in methods:
            return f"{owner}.{method} is gone"
        have = tuple(methods[method][: len(arguments)])
        if have != tuple(arguments):
            return f"{owner}.{method} takes {', '.join(have)} where {', '.join(arguments)} was"
    for path in read:
        owner = "Scheduler"
        for name in path.split("."):
            if name not in release[owner]["attributes"]:
                return f"{owner}.{name} (of Scheduler.{path}) is gone"
            owner = LEADS.get((owner, name), owner)
    return None


if __name__ == "__main__":
    rows = [
        f"{json.dumps(Path(folder).name.removeprefix('vllm-'))}: {json.dumps(table(Path(folder)), sort_keys=True)}"
        for folder in sys.argv[1:]
    ]
    print("{" + ",\n".join(rows) + "}")
