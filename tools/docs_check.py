"""Write the generated pages of docs/, or with --check say which are out of date (exit 1)."""

from __future__ import annotations

import sys
from pathlib import Path

from kvcatch.views.docs import GENERATED

DOCS = Path(__file__).parents[1] / "docs"


def main() -> int:
    """Check or write."""
    stale = []
    for name, make in GENERATED.items():
        path, text = DOCS / name, make()
        if path.exists() and path.read_text(encoding="utf-8") == text:
            continue
        stale.append(name)
        if "--check" not in sys.argv:
            path.write_text(text, encoding="utf-8")
    if "--check" in sys.argv and stale:
        print(f"out of date: {', '.join(stale)}. Run: python tools/docs_check.py", file=sys.stderr)
        return 1
    for name in stale:
        print(f"wrote docs/{name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
