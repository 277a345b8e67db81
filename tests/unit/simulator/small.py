"""Small random workloads with shared prefixes, repeats and block-aligned lengths."""

from __future__ import annotations

from hypothesis import strategies as st

from kvcatch.workload import Workload, build


@st.composite
def workloads(draw: st.DrawFn, grain: int = 4, most: int = 25) -> Workload:
    """Prompts are walks down a small tree, so prefixes repeat often."""
    rows = []
    for _ in range(draw(st.integers(1, most))):
        full = draw(st.integers(0, 6))
        tail = draw(st.integers(0 if full else 1, grain - 1))
        path = [draw(st.integers(0, 1)) for _ in range(full + (tail > 0))]
        lengths = [grain] * full + ([tail] if tail else [])
        # A partial segment is another thing than the full one in the same place.
        names = [(step, length) for step, length in zip(path, lengths, strict=True)]
        rows.append(
            {
                "arrival": 0.0,
                "prompt": sum(lengths),
                "output": draw(st.integers(0, 9)),
                "segments": list(zip(names, lengths, strict=True)),
                "tenant": draw(st.sampled_from(["a", "b"])),
            }
        )
    return build("small", rows, grain=grain)
