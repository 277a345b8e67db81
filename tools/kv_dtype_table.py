"""Which attention backend of which vLLM release takes which KV dtype, read from the source of each release.

    python tools/kv_dtype_table.py SOURCE... [--check]

SOURCE is an unpacked vLLM (a folder that holds ``vllm/``), its release in the folder's name (``0.24.0``), or a
wheel. Only the syntax is read (``ast``); nothing is imported. Writes ``src/kvcatch/planner/data/kv_dtypes.json``,
each fact with its file and line; ``--check`` compares instead.

What a release decides in code rather than in a list (fp8 in FlashAttention, NVFP4 in FlashInfer, fp8 in Triton
below compute capability 8.9) is written down here once a condition, with the line that must still be there.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import sys
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

TARGET = Path(__file__).resolve().parents[1] / "src/kvcatch/planner/data/kv_dtypes.json"
FOLDERS = (
    "vllm/v1/attention/",
    "vllm/attention/",
    "vllm/platforms/",
    "vllm/config/cache.py",
    "vllm/config/model.py",
)


class Condition(NamedTuple):
    """A decision in code: backend, KV dtypes (prefixes), capabilities it leaves, and the text that proves it."""

    backend: str
    dtypes: tuple[str, ...]
    majors: tuple[int, ...] | None
    least: tuple[int, int] | None
    file: str
    text: str
    reason: str
    head_size_not: int | None = None


CONDITIONS = (
    Condition(
        *("FLASH_ATTN", ("fp8",), (9,), None, "vllm/attention/utils/fa_utils.py"),
        text="def flash_attn_supports_fp8",
        reason="fp8 needs FlashAttention 3 on compute capability 9",
    ),
    Condition(
        *("FLASH_ATTN", ("fp8",), (9,), None, "vllm/v1/attention/backends/flash_attn.py"),
        text="and current_platform.is_device_capability_family(90)",
        reason="fp8 needs FlashAttention 3 on compute capability 9",
    ),
    Condition(
        *("FLASH_ATTN", ("fp8",), (9, 10), None, "vllm/v1/attention/backends/fa_utils.py"),
        text="fa_version == 4 and current_platform.is_device_capability_family(100)",
        reason="fp8 needs FlashAttention 3 on compute capability 9, or 4 on 10",
    ),
    Condition(
        *("FLASHINFER", ("nvfp4",), (10,), None, "vllm/v1/attention/backends/flashinfer.py"),
        text='"--kv-cache-dtype nvfp4 requires sm100f',
        reason="nvfp4 needs the TRT-LLM kernels of compute capability 10",
    ),
    Condition(
        *("FLASHINFER", ("nvfp4",), (8, 9, 10, 12), None, "vllm/v1/attention/backends/flashinfer.py"),
        text="def _nvfp4_kv_on_fa2",
        reason="nvfp4 needs compute capability 8, 9, 10 or 12, and no head size of 64 below 10",
        head_size_not=64,
    ),
    Condition(
        *("FLASHINFER", ("nvfp4_4over6",), (10,), None, "vllm/v1/attention/backends/flashinfer.py"),
        text='return kv_cache_dtype == "nvfp4"',
        reason="this NVFP4 variant needs the TRT-LLM kernels of compute capability 10",
    ),
    Condition(
        *("TRITON_ATTN", ("fp8",), None, (8, 9), "vllm/v1/attention/backends/triton_attn.py"),
        text="FP8 KV cache is not supported by the Triton attention backend",
        reason="Triton's fp8 needs compute capability 8.9",
    ),
)
#: FlashInfer of 0.31 answers nvfp4 with one check and no message.
NVFP4_CHECK = Condition(
    *("FLASHINFER", ("nvfp4",), (10,), None, "vllm/v1/attention/backends/flashinfer.py"),
    text="current_platform.is_device_capability_family(100)",
    reason="nvfp4 needs the TRT-LLM kernels of compute capability 10",
)


class Source(NamedTuple):
    """The files of one release that matter, by path."""

    version: str
    files: dict[str, str]

    def line(self, path: str, text: str) -> int | None:
        """1-based line of the first occurrence, None when it is not there."""
        for number, line in enumerate(self.files.get(path, "").splitlines(), 1):
            if text in line:
                return number
        return None


def read_source(path: Path) -> Source:
    """Files of a folder or a wheel."""
    match = re.search(r"(\d+\.\d+)\.\d+", path.name)
    if match is None:
        raise SystemExit(f"{path}: no version in the name")

    def wanted(name: str) -> bool:
        return name.endswith(".py") and name.startswith(FOLDERS)

    if path.is_file():
        with zipfile.ZipFile(path) as archive:
            files = {n: archive.read(n).decode() for n in archive.namelist() if wanted(n)}
    else:
        files = {
            name: file.read_text()
            for file in sorted(path.glob("vllm/**/*.py"))
            if wanted(name := file.relative_to(path).as_posix())
        }
    return Source(match[1], files)


class Classes:
    """All classes of a release by name, with their file."""

    def __init__(self, source: Source) -> None:
        self.found: dict[str, tuple[str, ast.ClassDef]] = {}
        for path, text in source.files.items():
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.ClassDef):
                    self.found.setdefault(node.name, (path, node))

    def lineage(self, name: str) -> Iterator[tuple[str, ast.ClassDef]]:
        """The class and its bases, depth first."""
        if name not in self.found:
            return
        path, node = self.found[name]
        yield path, node
        for base in node.bases:
            while isinstance(base, ast.Subscript):
                base = base.value
            if isinstance(base, ast.Name):
                yield from self.lineage(base.id)

    def attribute(self, name: str, wanted: str) -> tuple[str, ast.AnnAssign] | None:
        """The nearest annotated class attribute."""
        for path, node in self.lineage(name):
            for item in node.body:
                if (
                    isinstance(item, ast.AnnAssign)
                    and isinstance(item.target, ast.Name)
                    and item.target.id == wanted
                ):
                    return path, item
        return None

    def method(self, name: str, wanted: str) -> tuple[str, ast.FunctionDef] | None:
        """The nearest method."""
        for path, node in self.lineage(name):
            for item in node.body:
                if isinstance(item, ast.FunctionDef) and item.name == wanted:
                    return path, item
        return None


def backends(source: Source) -> dict[str, str]:
    """Backend name → class name, from the registry enum."""
    path = next(p for p in source.files if p.endswith("attention/backends/registry.py"))
    found: dict[str, str] = {}
    for node in ast.walk(ast.parse(source.files[path])):
        if isinstance(node, ast.ClassDef) and node.name.startswith("AttentionBackendEnum"):
            for item in node.body:
                if isinstance(item, ast.Assign) and isinstance(item.value, ast.Constant) and item.value.value:
                    assert isinstance(item.targets[0], ast.Name)
                    found[item.targets[0].id] = str(item.value.value).rpartition(".")[2]
    return found


def capability(function: ast.FunctionDef) -> dict[str, Any] | None:
    """The condition of ``supports_compute_capability``: {} always, None when it is not about CUDA capability."""
    returned = [node.value for node in ast.walk(function) if isinstance(node, ast.Return)]
    if len(returned) != 1 or returned[0] is None:
        return None
    found: dict[str, Any] = {}
    text = ast.unparse(returned[0])
    if text in ("True", "super().supports_compute_capability(capability)"):
        return {}
    for part in re.split(r" and ", text):
        if match := re.fullmatch(r"capability >= DeviceCapability\((\d+), (\d+)\)", part):
            found["least"] = [int(match[1]), int(match[2])]
        elif match := re.fullmatch(r"capability <= DeviceCapability\((\d+), (\d+)\)", part):
            found["most"] = [int(match[1]), int(match[2])]
        elif match := re.fullmatch(r"capability == DeviceCapability\((\d+), (\d+)\)", part):
            found["least"] = found["most"] = [int(match[1]), int(match[2])]
        elif match := re.fullmatch(r"\w+\.major == (\d+)", part):
            found["majors"] = [int(match[1])]
        elif match := re.fullmatch(r"capability\.major in \[([\d, ]+)\]", part):
            found["majors"] = [int(number) for number in match[1].split(",")]
        elif match := re.fullmatch(
            r"\(capability\.major, capability\.minor\) in \(\((\d+), (\d+)\), \((\d+), (\d+)\)\)", part
        ):
            found["least"], found["most"] = [int(match[1]), int(match[2])], [int(match[3]), int(match[4])]
        elif part not in ("device_capability is not None", "super().supports_compute_capability(capability)"):
            return None
    return found


def literal_flag(function: ast.FunctionDef | None) -> bool:
    """True when a boolean method returns a plain True."""
    if function is None:
        return False
    values = [node.value for node in ast.walk(function) if isinstance(node, ast.Return)]
    return len(values) == 1 and isinstance(values[0], ast.Constant) and values[0].value is True


def strings(node: ast.expr | None, classes: Classes) -> list[str] | None:
    """String elements of a list; ``list(Other.supported_kv_cache_dtypes)`` is followed."""
    if isinstance(node, ast.List) and all(isinstance(item, ast.Constant) for item in node.elts):
        return [str(item.value) for item in node.elts if isinstance(item, ast.Constant)]
    if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Attribute):
        owner = node.args[0].value
        if isinstance(owner, ast.Name) and (
            found := classes.attribute(owner.id, "supported_kv_cache_dtypes")
        ):
            return strings(found[1].value, classes)
    return None


def cite(path: str, node: ast.AST) -> str:
    """file:line."""
    return f"{path}:{getattr(node, 'lineno', 0)}"


def backend_row(classes: Classes, name: str) -> dict[str, Any] | None:
    """What one backend class says about itself."""
    attribute = classes.attribute(name, "supported_kv_cache_dtypes")
    if attribute is None:
        return None
    path, node = attribute
    dtypes = strings(node.value, classes)
    if dtypes is None:
        return None
    row: dict[str, Any] = {"dtypes": dtypes, "source": cite(path, node)}
    # Decided in a method instead of a list (0.12 and 0.24): the names it compares with count.
    override = classes.method(name, "supports_kv_cache_dtype")
    base = classes.found.get("AttentionBackend", ("", None))[1]
    if override and base and override[1] not in base.body:
        text = ast.unparse(override[1])
        named = set(re.findall(r"'([a-z0-9_]+)'", text)) & set(KNOWN)
        if "supported_kv_cache_dtypes" not in text and "super()" not in text and "turboquant" not in text:
            named |= {"fp8_e4m3", "fp8_e5m2", "fp8"} if "startswith('fp8')" in text else set()
            row["dtypes"] = [dtype for dtype in KNOWN if dtype in named]
            row["source"] = cite(override[0], override[1])
    method = classes.method(name, "supports_compute_capability")
    found = capability(method[1]) if method else {}
    if found:
        row["capability"] = {**found, "source": cite(method[0], method[1])} if method else found
    elif found is None:
        row["capability"] = None  # not about CUDA
    sizes = classes.method(name, "get_supported_head_sizes")
    if sizes is not None:
        returns = [n.value for n in ast.walk(sizes[1]) if isinstance(n, ast.Return)]
        if len(returns) == 1 and isinstance(returns[0], ast.List):
            listed = [item.value for item in returns[0].elts if isinstance(item, ast.Constant)]
            if listed:
                row["head_sizes"] = listed
    if "/mla/" in classes.found[name][0]:
        row["mla"] = True
    sparse = classes.method(name, "is_sparse")
    if literal_flag(sparse[1] if sparse else None):
        row["sparse"] = True
    return row


#: Every KV dtype any release names, in the order of 0.33.
KNOWN: list[str] = []


def cache_dtypes(source: Source) -> tuple[list[str], str]:
    """The values of ``--kv-cache-dtype`` with their citation."""
    path = "vllm/config/cache.py"
    for node in ast.walk(ast.parse(source.files[path])):
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "CacheDType":
            return re.findall(r"'([a-z0-9_]+)'", ast.unparse(node.value)), cite(path, node)
    raise SystemExit(f"{source.version}: no CacheDType")


def priorities(source: Source) -> dict[str, Any]:
    """Order in which backends are tried on CUDA: keys mla/mha and the capability's major, ``*`` for the rest."""
    path = "vllm/platforms/cuda.py"
    tree = ast.parse(source.files[path])
    function = next(
        n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == "_get_backend_priorities"
    )
    found: dict[str, Any] = {"source": cite(path, function)}
    extra: dict[str, list[str]] = {}

    def names(node: ast.AST) -> list[str]:
        listed: list[str] = []
        for item in node.elts if isinstance(node, ast.List) else []:
            if isinstance(item, ast.Starred):
                listed += extra.get(ast.unparse(item.value), [])
            elif isinstance(item, ast.Attribute):
                listed.append(item.attr)
        return listed

    def walk(body: list[ast.stmt], kind: str, major: str) -> None:
        for node in body:
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                extra.setdefault(node.targets[0].id, names(node.value))
            elif isinstance(node, ast.Return) and node.value is not None:
                found.setdefault(f"{kind}/{major}", names(node.value))
            elif isinstance(node, ast.If):
                test = ast.unparse(node.test)
                if test == "use_mla":
                    walk(node.body, "mla", "*")
                    walk(node.orelse, "mha", "*")
                elif match := re.search(r"major == (\d+)", test):
                    walk(node.body, kind, match[1])
                    extra.clear()
                    walk(node.orelse, kind, "*")
                else:  # the quantised branch comes first in every release
                    walk(node.body, kind, major)
                    walk(node.orelse, kind, major)

    walk(function.body, "mha", "*")
    return found


def conditions(source: Source, rows: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The conditions whose line this release holds; where two say the same, the later one counts."""
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    wanted = list(CONDITIONS)
    if "nvfp4" in rows.get("FLASHINFER", {}).get("dtypes", []):
        texts = [c.text for c in CONDITIONS if c.backend == "FLASHINFER" and source.line(c.file, c.text)]
        wanted += [] if texts else [NVFP4_CHECK]
    for condition in wanted:
        line = source.line(condition.file, condition.text)
        if line is None or condition.backend not in rows:
            continue
        row = {k: v for k, v in condition._asdict().items() if v is not None and k not in ("file", "text")}
        found[condition.backend, condition.dtypes] = {**row, "source": f"{condition.file}:{line}"}
    return list(found.values())


def cascades(source: Source, classes: Classes, names: Mapping[str, str]) -> list[str]:
    """Backends that read a common prefix once a batch (cascade attention), where that is on by default."""
    if source.line("vllm/config/model.py", "disable_cascade_attn: bool = True"):
        return []
    found = []
    for name, owner in names.items():
        path = classes.found.get(owner, ("", None))[0]
        text = source.files.get(path, "")
        if "return use_cascade_attention(*args, **kwargs)" in text and "# return use_cascade" not in text:
            found.append(name)
    return found


def release(source: Source) -> dict[str, Any]:
    """All facts of one release."""
    classes, named = Classes(source), backends(source)
    values, where = cache_dtypes(source)
    rows = {name: row for name, owner in sorted(named.items()) if (row := backend_row(classes, owner))}
    return {
        "cache_dtypes": values,
        "cache_dtypes_source": where,
        "backends": rows,
        "priorities": priorities(source),
        "conditions": conditions(source, rows),
        "cascade": cascades(source, classes, named),
    }


def build(paths: list[Path]) -> str:
    """The table as JSON text, one release after the other."""
    sources = sorted(
        (read_source(path) for path in paths), key=lambda s: [int(n) for n in s.version.split(".")]
    )
    for source in reversed(sources):
        KNOWN.extend(dtype for dtype in cache_dtypes(source)[0] if dtype not in KNOWN)
    table = {source.version: release(source) for source in sources}
    return json.dumps(table, separators=(",", ":"), sort_keys=True) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sources", type=Path, nargs="+")
    parser.add_argument("--check", action="store_true", help="compare with the packaged table, write nothing")
    args = parser.parse_args()
    text = build(args.sources)
    if args.check:
        old, new = json.loads(TARGET.read_text()), json.loads(text)
        stale = [version for version in new if old.get(version) != new[version]]
        print(f"differs: {', '.join(stale)}" if stale else "up to date", file=sys.stderr)
        return 1 if stale else 0
    TARGET.write_text(text)
    print(f"Wrote {TARGET} ({len(text):,} bytes)", file=sys.stderr)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
