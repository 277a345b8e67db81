"""One arm: what a server expects of the corpus, how it goes on by itself, and which questions it answers.

Token ids and texts stay in this process's memory; results hold numbers only.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import msgspec

from kvcatch.errors import KVCatchError
from kvcatch.quality.corpus import Document
from kvcatch.quality.endpoint import Continuation, Endpoint, Position
from kvcatch.quality.stats import lower_kl
from kvcatch.quality.tasks import Question

Progress = Callable[[str], None]


class Size(msgspec.Struct, frozen=True):
    """How much is measured."""

    documents: int = 8
    tokens: int = 512  # of each document
    generations: int = 4
    prompt_tokens: int = 128  # of a generation
    generated_tokens: int = 96
    tasks: int = 4  # groups of questions
    seed: int = 0


class Work(msgspec.Struct, frozen=True):
    """The same work for every arm: token ids of the documents, and questions."""

    names: tuple[str, ...]
    ids: tuple[tuple[int, ...], ...]
    questions: tuple[Question, ...]
    size: Size


class Arm(msgspec.Struct, frozen=True, kw_only=True):
    """What one server did with the work."""

    model: str
    root: str
    version: str | None
    k: int
    scored: tuple[tuple[Position, ...], ...] = ()
    generated: tuple[Continuation, ...] = ()
    decode_gap: tuple[tuple[float, ...], ...] = ()  # KL of decode from prefill, per generated token
    right: tuple[bool, ...] = ()
    seconds: float = 0.0


def prepare(
    endpoint: Endpoint, documents: Sequence[Document], questions: Sequence[Question], size: Size
) -> Work:
    """Cut the documents by the server's tokenizer. Raises KVCatchError when none is long enough to say anything."""
    chosen = documents[: size.documents]
    ids = [tuple(endpoint.tokens(one.text)[: size.tokens]) for one in chosen]
    long = [(one.name, row) for one, row in zip(chosen, ids, strict=True) if len(row) >= 32]
    if not long:
        raise KVCatchError("every document is shorter than 32 tokens.", "Give longer texts.")
    return Work(tuple(name for name, _ in long), tuple(row for _, row in long), tuple(questions), size)


def measure(endpoint: Endpoint, work: Work, say: Progress) -> Arm:
    """Run the whole work on one server."""
    start = time.monotonic()
    endpoint.new_pass()
    scored = []
    for at, ids in enumerate(work.ids, 1):
        say(f"document {at} of {len(work.ids)}")
        scored.append(tuple(endpoint.score(list(ids))))
    generated, gaps = [], []
    prompts = generation_prompts(work)
    for at, prompt in enumerate(prompts, 1):
        say(f"generation {at} of {len(prompts)}")
        one, gap = continuation(endpoint, prompt, work.size.generated_tokens)
        generated.append(one)
        gaps.append(gap)
    right = []
    for at, question in enumerate(work.questions, 1):
        if at % 10 == 1:
            say(f"question {at} of {len(work.questions)}")
        answer = endpoint.generate(question.prompt, question.max_tokens, logprobs=False)
        right.append(question.right(answer.text))
    return Arm(
        model=endpoint.model,
        root=endpoint.root,
        version=endpoint.version,
        k=endpoint.k,
        scored=tuple(scored),
        generated=tuple(generated),
        decode_gap=tuple(gaps),
        right=tuple(right),
        seconds=time.monotonic() - start,
    )


def generation_prompts(work: Work) -> list[list[int]]:
    """The beginnings that are continued."""
    return [list(ids[: work.size.prompt_tokens]) for ids in work.ids[: work.size.generations]]


def continuation(
    endpoint: Endpoint, prompt: list[int], tokens: int
) -> tuple[Continuation, tuple[float, ...]]:
    """What the server generates, and how far its decoding is from its own prefill over the same tokens.

    Prefill reads each key and value it has just written, decoding those written step by step: a fault on one of the
    two paths shows as a divergence between them that grows with the generated length, whatever the model says.
    """
    made = endpoint.generate(prompt, tokens)
    if not made.positions:
        return made, ()
    again = endpoint.score([*prompt, *(one.token for one in made.positions)])[len(prompt) - 1 :]
    return made, tuple(lower_kl(b.top, a.top) for a, b in zip(made.positions, again, strict=True))


class Floor(msgspec.Struct, frozen=True):
    """The reference against itself: its own noise."""

    kl: tuple[tuple[float, ...], ...]
    flips: tuple[tuple[float, ...], ...]
    generations: int
    changed_generations: int


def divergences(a: Sequence[Position], b: Sequence[Position]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """(KL of b from a, 1 where the likeliest token differs) at every position of one document."""
    pairs = list(zip(a, b, strict=True))
    return tuple(lower_kl(x.top, y.top) for x, y in pairs), tuple(float(x.best != y.best) for x, y in pairs)


def repeat(endpoint: Endpoint, work: Work, arm: Arm, say: Progress) -> Floor:
    """The reference once more: two documents and one generation; everything when any of these differs."""
    endpoint.new_pass()
    rows: list[tuple[tuple[float, ...], tuple[float, ...]]] = []
    for at, ids in enumerate(work.ids):
        if at >= 2 and not any(any(kl) for kl, _ in rows):
            break
        say(f"reference against itself, document {at + 1}")
        rows.append(divergences(arm.scored[at], endpoint.score(list(ids))))
    tried = changed = 0
    for at, prompt in enumerate(generation_prompts(work)):
        if at >= 1 and not changed:
            break
        first = [one.token for one in arm.generated[at].positions]
        second = endpoint.generate(prompt, work.size.generated_tokens).positions
        changed += first != [one.token for one in second]
        tried += 1
    return Floor(tuple(kl for kl, _ in rows), tuple(flips for _, flips in rows), tried, changed)
