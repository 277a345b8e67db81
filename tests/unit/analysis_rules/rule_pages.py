"""Metrics pages with the figures of a case."""

from __future__ import annotations

from typing import Any

from kvcatch.sources import openmetrics

_LABELS = 'engine="0",model_name="m"'


def text(figures: dict[str, Any], unix_seconds: float) -> str:
    """One page. ``finished``, ``mean_prompt``, ``mean_output`` become histograms; pool size and block size labels.

    ``config``: more labels of the cache configuration. ``lifetimes``: heights of that histogram by upper bound.
    ``time_to_first_token``: first tokens given while no request has finished.
    """
    lines = [f"# scrape_unix_ms {round(unix_seconds * 1000)}"]
    own = dict(figures)
    size, blocks = own.pop("block_size", 16), own.pop("num_gpu_blocks", 1001)
    config = {"enable_prefix_caching": "True"} | own.pop("config", {})
    labels = "".join(f',{name}="{value}"' for name, value in config.items())
    lines += [
        "# TYPE vllm:cache_config_info gauge",
        f'vllm:cache_config_info{{block_size="{size}",num_gpu_blocks="{blocks}"{labels},engine="0"}} 1.0',
    ]
    finished = own.pop("finished", None)
    sizes = {
        "request_prompt_tokens": own.pop("mean_prompt", 0),
        "request_generation_tokens": own.pop("mean_output", 0),
    }
    for name, value in (sizes | {"e2e_request_latency_seconds": 10.0} if finished else {}).items():
        lines += [
            f"# TYPE vllm:{name} histogram",
            f'vllm:{name}_bucket{{{_LABELS},le="+Inf"}} {finished}',
            f"vllm:{name}_count{{{_LABELS}}} {finished}",
            f"vllm:{name}_sum{{{_LABELS}}} {finished * value}",
        ]
    lifetimes = own.pop("lifetimes", {})
    if lifetimes:
        name = "vllm:kv_block_lifetime_seconds"
        last = max(lifetimes.values())
        heights = lifetimes | {"+Inf": last}
        lines += [
            f"# TYPE {name} histogram",
            f"{name}_count{{{_LABELS}}} {last}",
            f"{name}_sum{{{_LABELS}}} {last}",
        ]
        lines += [f'{name}_bucket{{{_LABELS},le="{bound}"}} {height}' for bound, height in heights.items()]
    waited = own.pop("time_to_first_token", None)
    histograms = {"time_to_first_token_seconds": waited, "e2e_request_latency_seconds": 0} if waited else {}
    for name, count in histograms.items():
        lines += [f"# TYPE vllm:{name} histogram", f"vllm:{name}_count{{{_LABELS}}} {count}"]
        lines += [
            f"vllm:{name}_sum{{{_LABELS}}} {count}",
            f'vllm:{name}_bucket{{{_LABELS},le="+Inf"}} {count}',
        ]
    for reason, count in own.pop("num_requests_waiting_by_reason", {}).items():
        lines.append(f'vllm:num_requests_waiting_by_reason{{{_LABELS},reason="{reason}"}} {count}')
    for name, value in own.items():
        kind = "counter" if name.endswith("_total") else "gauge"
        lines += [f"# TYPE vllm:{name} {kind}", f"vllm:{name}{{{_LABELS}}} {value}"]
    return "\n".join([*lines, ""])


def capture(pages: list[dict[str, Any]], every: float = 10.0) -> Any:
    """A scraped target with one page every so many seconds."""
    from kvcatch.sources.scrape import ScrapeCapture

    texts = [text(figures, 1_764_439_200.0 + every * number) for number, figures in enumerate(pages)]
    return ScrapeCapture("page", [page for one in texts for page in openmetrics.parse([one.encode()])])
