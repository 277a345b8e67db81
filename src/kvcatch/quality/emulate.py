"""The same model in transformers, with a cache that stores in any format in any layer.

It blames layers, tries formats that the engine here cannot run, and suggests scales. What it says counts only where it
reproduces what the engine itself measured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kvcatch.errors import KVCatchError, missing_extra
from kvcatch.quality.endpoint import Position
from kvcatch.quality.formats import FP8_MAX, stored, torch_

#: (layer, keys, values) -> what a cache gives back of them
Store = Callable[[int, Any, Any], tuple[Any, Any]]


def everywhere(form: str, scale: float = 1.0, rounding: str = "nearest") -> Store:
    """All layers in one format."""
    return lambda _layer, keys, values: (
        stored(keys, form, scale, rounding),
        stored(values, form, scale, rounding),
    )


def only(layer: int, form: str, scale: float = 1.0, others: str = "auto", rounding: str = "nearest") -> Store:
    """One layer in one format and scale, the others in another format at scale 1."""

    def store(at: int, keys: Any, values: Any) -> tuple[Any, Any]:
        if at == layer:
            return stored(keys, form, scale, rounding), stored(values, form, scale, rounding)
        return stored(keys, others, 1.0, rounding), stored(values, others, 1.0, rounding)

    return store


def one_head(layer: int, head: int, form: str, rounding: str = "nearest") -> Store:
    """One KV head of one layer in a format, everything else as it is."""

    def store(at: int, keys: Any, values: Any) -> tuple[Any, Any]:
        if at != layer:
            return keys, values
        keys, values = keys.clone(), values.clone()
        keys[:, head] = stored(keys[:, head], form, 1.0, rounding)
        values[:, head] = stored(values[:, head], form, 1.0, rounding)
        return keys, values

    return store


def scaled(
    form: str, k_scales: Sequence[float], v_scales: Sequence[float], rounding: str = "nearest"
) -> Store:
    """All layers in one format, each with its own scales."""
    return lambda at, keys, values: (
        stored(keys, form, k_scales[at], rounding),
        stored(values, form, v_scales[at], rounding),
    )


class Emulator:
    """A decoder-only model of transformers on this machine's CPU."""

    def __init__(self, folder: str, dtype: str = "float32", threads: int | None = None) -> None:
        torch = torch_()
        try:
            from transformers import AutoModelForCausalLM, DynamicCache
            from transformers.utils.logging import disable_progress_bar
        except ImportError:
            raise missing_extra("transformers", "quality") from None
        disable_progress_bar()
        if threads:
            torch.set_num_threads(threads)
        try:
            self.model = AutoModelForCausalLM.from_pretrained(
                folder, dtype=getattr(torch, dtype), local_files_only=True
            ).eval()
        except (OSError, ValueError) as error:
            raise KVCatchError(
                f"transformers cannot load {folder}: {str(error).splitlines()[0]}",
                "Give a local model folder.",
            ) from None
        config = self.model.config
        self.layers = int(config.num_hidden_layers)
        self.kv_heads = int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)
        self.head_size = int(
            getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        )

        class StoringCache(DynamicCache):  # type: ignore[misc]  # transformers has no types here
            """A cache that gives back what its format keeps."""

            store: Store = staticmethod(lambda _layer, keys, values: (keys, values))

            def update(self, keys: Any, values: Any, layer: int, *rest: Any, **more: Any) -> Any:
                keys, values = self.store(layer, keys, values)
                return super().update(keys, values, layer, *rest, **more)

        self._cache = StoringCache

    def logprobs(self, ids: Sequence[int], store: Store | None = None) -> Any:
        """Log-probabilities (positions, vocabulary) of every token but the first."""
        torch = torch_()
        cache = self._cache()
        if store is not None:
            cache.store = store
        with torch.inference_mode():
            logits = self.model(torch.tensor([list(ids)]), past_key_values=cache, use_cache=True).logits
            return torch.log_softmax(logits[0, :-1].float(), dim=-1)

    def extremes(self, ids: Sequence[int]) -> tuple[list[float], list[float]]:
        """The largest magnitudes of keys and of values, per layer."""
        keys, values = [0.0] * self.layers, [0.0] * self.layers

        def note(layer: int, k: Any, v: Any) -> tuple[Any, Any]:
            keys[layer] = max(keys[layer], float(k.abs().max()))
            values[layer] = max(values[layer], float(v.abs().max()))
            return k, v

        self.logprobs(ids, note)
        return keys, values


def positions(logprobs: Any, ids: Sequence[int], k: int) -> list[Position]:
    """What a server with ``k`` log-probabilities would have returned."""
    torch = torch_()
    top, tokens = torch.topk(logprobs, k, dim=-1)
    rows = []
    for at, token in enumerate(ids[1:]):
        row = dict(zip(tokens[at].tolist(), top[at].tolist(), strict=True))
        best = int(tokens[at][0])
        row.setdefault(token, float(logprobs[at, token]))
        rows.append(Position(token, row[token], best, row))
    return rows


def suggested_scales(extremes: Sequence[float], form: str = "e4m3") -> list[float]:
    """The scale per layer that maps the largest value seen to the largest of the format."""
    return [max(value, 1e-6) / FP8_MAX[form] for value in extremes]
