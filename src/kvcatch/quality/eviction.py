"""The judge of token eviction: every policy at every budget on the same prompts, against the full cache.

A prompt is read once with full attention. Then its keys and values are thinned out, and the model goes on: over the rest of
the text (what it expects), and over questions about the prompt (what it still knows).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from kvcatch.errors import KVCatchError, missing_extra
from kvcatch.quality import tasks
from kvcatch.quality.corpus import Document
from kvcatch.quality.formats import torch_
from kvcatch.quality.policies import BLOCK, POLICIES, SINKS, choose, choose_blocks, kept_count
from kvcatch.quality.stats import binomial_tail, bootstrap, clopper_pearson, mcnemar
from kvcatch.results import Result

BUDGETS = (1.0, 0.75, 0.5, 0.25, 0.12)
SIGNIFICANT = 0.01
#: the most of a text's divergence and of a task's answers that a recommended budget may cost
MAX_KL = 0.05
MAX_LOSS = 0.10


class Trial(Result, frozen=True):
    """One policy at one budget. KL in nats over the whole vocabulary, against the full cache.

    ``kv_bytes`` is the storage that was really held; ``blocks_freed`` counts blocks of 16 tokens that are empty in all layers
    and heads, which is all that a paged engine could give back.
    """

    policy: str
    budget: float
    grain: str  # token | block
    kl: float
    kl_low: float
    kl_high: float
    flips: float
    right: dict[str, int]
    lost: dict[str, int]
    p_value: dict[str, float]
    kv_bytes: int
    predicted_bytes: int
    blocks_freed: float
    blocks: float
    seconds: float


class Advice(Result, frozen=True):
    """The smallest budget that holds for one workload, over the policies; policy None: none does."""

    workload: str
    policy: str | None
    budget: float | None
    grain: str | None
    reason: str


class Eviction(Result, frozen=True):
    """The judge's answer, and where it is valid: nothing is said about longer prompts."""

    model: str
    trials: tuple[Trial, ...]
    front: tuple[tuple[str, str, float], ...]  # (policy, grain, budget) that no other beats in bytes and KL
    advice: tuple[Advice, ...]
    prompt_tokens: tuple[int, int]
    documents: int
    questions: dict[str, int]
    full_right: dict[str, int]
    powerless: tuple[str, ...]
    seed: int
    seconds: float


class Case(msgspec.Struct, frozen=True):
    """One prompt: what is kept of it, and what follows, as rows of equal meaning (a text, or several questions)."""

    workload: str
    prompt: tuple[int, ...]
    follow: tuple[tuple[int, ...], ...]
    scored: tuple[int, ...]  # how many last tokens of each row count


class Reader:
    """A model and its tokenizer, reading prompts with visible attention."""

    def __init__(self, folder: str) -> None:
        torch_()
        try:
            from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache
            from transformers.utils.logging import disable_progress_bar
        except ImportError:
            raise missing_extra("transformers", "quality") from None
        disable_progress_bar()
        try:
            self.tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
            load = AutoModelForCausalLM.from_pretrained
            self.model = load(
                folder, dtype="float32", local_files_only=True, attn_implementation="eager"
            ).eval()
        except (OSError, ValueError) as error:
            raise KVCatchError(
                f"transformers cannot load {folder}: {str(error).splitlines()[0]}",
                "Give a local model folder.",
            ) from None
        self._cache = DynamicCache

    def ids(self, text: str) -> list[int]:
        """Token ids, without any that a tokenizer adds in front."""
        found: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return found

    def read(self, prompt: Sequence[int]) -> tuple[list[tuple[Any, Any]], tuple[Any, ...]]:
        """Keys and values of every layer, and every layer's attention."""
        torch = torch_()
        with torch.inference_mode():
            out = self.model(torch.tensor([list(prompt)]), use_cache=True, output_attentions=True)
        return [(layer.keys, layer.values) for layer in out.past_key_values.layers], out.attentions

    def follow(self, kept: Sequence[tuple[Any, Any]], start: int, rows: Sequence[Sequence[int]]) -> Any:
        """Log-probabilities (rows, longest, vocabulary) of what follows a thinned prompt of ``start`` tokens."""
        torch = torch_()
        longest = max(map(len, rows))
        batch = torch.tensor([[*row, *[row[-1]] * (longest - len(row))] for row in rows])
        cache = self._cache()
        for layer, (keys, values) in enumerate(kept):
            cache.update(keys.expand(len(rows), -1, -1, -1), values.expand(len(rows), -1, -1, -1), layer)
        places = torch.arange(start, start + longest)[None].expand(len(rows), -1)
        with torch.inference_mode():
            logits = self.model(batch, past_key_values=cache, position_ids=places, use_cache=True).logits
        return torch.log_softmax(logits.float(), dim=-1)


def cases(
    reader: Reader, documents: Sequence[Document], seed: int, prompt: int, follow: int, groups: int
) -> list[Case]:
    """Texts cut at a place that the seed decides, and groups of questions about one prompt."""
    made = []
    for at, one in enumerate(documents[:groups]):
        ids = reader.ids(one.text)
        start = (seed * 7 + at) % max(1, len(ids) - prompt - follow)
        part = ids[start : start + prompt + follow]
        if len(part) < prompt + follow:
            continue
        made.append(Case("text", tuple(part[:prompt]), (tuple(part[prompt - 1 :]),), (follow,)))
        # The last token of the prompt is read again with what follows: its own prediction counts too.
    texts = [
        one.text[: len(one.text) * prompt // max(prompt, len(reader.ids(one.text)))]
        for one in documents[:groups]
    ]
    questions = [
        *tasks.needles(texts, groups, seed, characters=4 * prompt),
        *tasks.recall(groups, seed),
        *tasks.arithmetic(6 * groups, seed),
    ]
    heads: dict[tuple[str, int], list[tasks.Question]] = {}
    for question in questions:
        heads.setdefault((question.kind, question.group), []).append(question)
    for (kind, _), group in heads.items():
        if kind == "arithmetic":
            parts = [group[at : at + 6] for at in range(0, len(group), 6)]
        else:
            parts = [group]
        made += [case for part in parts if (case := _asked(reader, kind, part)) is not None]
    return made


def _asked(reader: Reader, kind: str, group: Sequence[tasks.Question]) -> Case | None:
    """The tokens that all questions share are the prompt; each question and its answer follow."""
    rows = [reader.ids(one.prompt) for one in group]
    answers = [reader.ids(f" {one.answer}") for one in group]
    shared = 0
    while all(len(row) > shared + 1 and row[shared] == rows[0][shared] for row in rows):
        shared += 1
    if shared <= SINKS + BLOCK:
        return None
    return Case(
        kind,
        tuple(rows[0][:shared]),
        tuple((*row[shared:], *answer) for row, answer in zip(rows, answers, strict=True)),
        tuple(len(answer) for answer in answers),
    )


def thin(
    kept: Sequence[tuple[Any, Any]], scores: Sequence[Any], budget: float, grain: str
) -> tuple[list[tuple[Any, Any]], int, int]:
    """(keys and values that stay, blocks freed, blocks) of one prompt."""
    torch = torch_()
    tokens = kept[0][0].shape[2]
    blocks = -(-tokens // BLOCK)
    if budget >= 1:
        return list(kept), 0, blocks
    held = torch.zeros(tokens, dtype=torch.bool)
    thinned = []
    same = choose_blocks(list(scores), budget) if grain == "block" else None
    for (keys, values), score in zip(kept, scores, strict=True):
        if same is None:
            index = choose(score, budget)
            held[index.flatten()] = True
            wide = index[..., None].expand(-1, -1, -1, keys.shape[-1])
            thinned.append((keys.gather(2, wide), values.gather(2, wide)))
        else:
            held[same] = True
            thinned.append((keys[:, :, same].contiguous(), values[:, :, same].contiguous()))
    padded = torch.nn.functional.pad(held, (0, blocks * BLOCK - tokens)).view(blocks, BLOCK)
    return thinned, int((~padded.any(dim=1)).sum()), blocks


def stored_bytes(kept: Sequence[tuple[Any, Any]]) -> int:
    """Bytes that the tensors really hold, views and slack included."""
    return sum(one.untyped_storage().nbytes() for pair in kept for one in pair)


class _Seen(msgspec.Struct):
    """What one policy and budget did, case by case."""

    kl: list[list[float]] = msgspec.field(default_factory=list)
    flips: list[list[float]] = msgspec.field(default_factory=list)
    right: dict[str, list[bool]] = msgspec.field(default_factory=dict)
    kv_bytes: int = 0
    predicted: int = 0
    freed: int = 0
    blocks: int = 0
    seconds: float = 0.0


def judge(
    reader: Reader,
    made: Sequence[Case],
    say: Callable[[str], None],
    *,
    policies: Sequence[str] = tuple(POLICIES),
    budgets: Sequence[float] = BUDGETS,
    grains: Sequence[str] = ("token", "block"),
    seed: int = 0,
    model: str = "",
) -> Eviction:
    """Run everything. Raises KVCatchError when no prompt is long enough."""
    begun = time.monotonic()
    if not made:
        raise KVCatchError(
            "no document is long enough for the prompt and what follows.", "Give longer texts."
        )
    seen: dict[tuple[str, str, float], _Seen] = {}
    full = _Seen()
    for at, case in enumerate(made, 1):
        say(f"prompt {at} of {len(made)}")
        kept, attention = reader.read(case.prompt)
        start = len(case.prompt) - (case.workload == "text")
        # A text goes on from the last token of its prompt; that token is not in the cache yet.
        kept = [(keys[:, :, :start].clone(), values[:, :, :start].clone()) for keys, values in kept]
        attention = tuple(one[:, :, :start, :start] for one in attention)
        base = reader.follow(kept, start, case.follow)
        _note(full, case, base, base)
        for policy in policies:
            scores = [
                POLICIES[policy](keys, weights, seed * 1000 + layer)
                for layer, ((keys, _), weights) in enumerate(zip(kept, attention, strict=True))
            ]
            for grain in grains:
                for budget in budgets:
                    row = seen.setdefault((policy, grain, budget), _Seen())
                    since = time.monotonic()
                    thinned, freed, blocks = thin(kept, scores, budget, grain)
                    _note(row, case, base, reader.follow(thinned, start, case.follow))
                    row.seconds += time.monotonic() - since
                    row.kv_bytes += stored_bytes(thinned)
                    token = stored_bytes(kept) // start
                    row.predicted += token * kept_count(start, budget)
                    row.freed += freed
                    row.blocks += blocks
    return _conclude(model, made, seen, full, seed, time.monotonic() - begun)


def _note(row: _Seen, case: Case, base: Any, new: Any) -> None:
    """Text: divergence at every position. Questions: whether every token of the answer is the likeliest."""
    torch = torch_()
    if case.workload == "text":
        count = case.scored[0]
        p, q = base[0, :count], new[0, :count]
        row.kl.append((p.exp() * (p - q)).sum(dim=-1).clamp(min=0).tolist())
        row.flips.append((p.argmax(dim=-1) != q.argmax(dim=-1)).float().tolist())
        return
    for at, (tokens, count) in enumerate(zip(case.follow, case.scored, strict=True)):
        end = len(tokens)
        best = new[at, end - count - 1 : end - 1].argmax(dim=-1)
        right = bool((best == torch.tensor(tokens[end - count :])).all())
        row.right.setdefault(case.workload, []).append(right)


def _conclude(
    model: str,
    made: Sequence[Case],
    seen: dict[tuple[str, str, float], _Seen],
    full: _Seen,
    seed: int,
    seconds: float,
) -> Eviction:
    trials = [_trial(*key, row, full) for key, row in seen.items()]
    powerless = []
    for kind, right in full.right.items():
        chance = {"needle": 1 / 5, "recall": 1 / 12, "arithmetic": 28 / 784}[kind]
        if binomial_tail(sum(right), len(right), chance) >= SIGNIFICANT:
            powerless.append(kind)
    lengths = [len(case.prompt) for case in made]
    return Eviction(
        model=model,
        trials=tuple(trials),
        front=tuple((one.policy, one.grain, one.budget) for one in pareto(trials)),
        advice=tuple(_advice(kind, trials, full, powerless) for kind in ("text", *full.right)),
        prompt_tokens=(min(lengths), max(lengths)),
        documents=len(full.kl),
        questions={kind: len(right) for kind, right in full.right.items()},
        full_right={kind: sum(right) for kind, right in full.right.items()},
        powerless=tuple(powerless),
        seed=seed,
        seconds=seconds,
    )


def _trial(policy: str, grain: str, budget: float, row: _Seen, full: _Seen) -> Trial:
    kl, flips = bootstrap(row.kl or [[0.0]]), bootstrap(row.flips or [[0.0]])
    lost, p = {}, {}
    for kind, right in row.right.items():
        lost[kind] = sum(a and not b for a, b in zip(full.right[kind], right, strict=True))
        won = sum(b and not a for a, b in zip(full.right[kind], right, strict=True))
        p[kind] = mcnemar(lost[kind], won)
    return Trial(
        policy=policy,
        budget=budget,
        grain=grain,
        kl=kl.value,
        kl_low=kl.low,
        kl_high=kl.high,
        flips=flips.value,
        right={kind: sum(right) for kind, right in row.right.items()},
        lost=lost,
        p_value=p,
        kv_bytes=row.kv_bytes,
        predicted_bytes=row.predicted,
        blocks_freed=row.freed,
        blocks=row.blocks,
        seconds=row.seconds,
    )


def pareto(trials: Sequence[Trial]) -> list[Trial]:
    """Trials that no other beats in bytes and divergence, most bytes first."""
    front: list[Trial] = []
    for one in trials:
        beaten = any(
            other.kv_bytes <= one.kv_bytes
            and other.kl <= one.kl
            and (other.kv_bytes, other.kl) != (one.kv_bytes, one.kl)
            for other in trials
        )
        if not beaten and not any((one.kv_bytes, one.kl) == (other.kv_bytes, other.kl) for other in front):
            front.append(one)
    return sorted(front, key=lambda one: -one.kv_bytes)


def _advice(workload: str, trials: Sequence[Trial], full: _Seen, powerless: Sequence[str]) -> Advice:
    """The smallest budget below 1 whose loss is within what is accepted; never for what could not be measured."""
    if workload in powerless:
        return Advice(workload=workload, policy=None, budget=None, grain=None, reason="no power: the full cache does not beat guessing")  # fmt: skip

    had = sum(full.right.get(workload, ()))

    def holds(one: Trial) -> bool:
        if workload == "text":
            return one.kl_high <= MAX_KL
        return one.lost[workload] <= MAX_LOSS * had and one.p_value[workload] >= SIGNIFICANT

    good = [one for one in trials if one.budget < 1 and holds(one)]
    if not good:
        return Advice(workload=workload, policy=None, budget=None, grain=None, reason="every policy loses too much at every budget below 100 %")  # fmt: skip
    best = min(
        good, key=lambda one: (one.budget, one.kl if workload == "text" else one.lost[workload], one.kl)
    )
    if workload == "text":
        reason = f"KL {best.kl:.3g} nats (up to {best.kl_high:.3g})"
    else:
        most = clopper_pearson(best.lost[workload], had, 0.1)[1]
        reason = f"{best.lost[workload]} of {had} answers lost (no more than {most:.0%}, 95 % sure)"
    return Advice(workload=workload, policy=best.policy, budget=best.budget, grain=best.grain, reason=reason)
