"""Shorten a prompt to a budget: whole turns first, then the middle of the longest user text.

The system prompt, the template's own text, the last turn and every pair of tool call and result stay whole; the
count after every cut is the exact one, so what is sent fits by the same count that refused it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

REJECT, DROP_TURNS, MIDDLE_OUT = "reject", "drop_turns", "middle_out"
POLICIES = (REJECT, DROP_TURNS, MIDDLE_OUT)
#: stands where text was taken out; text that already holds it is cut again at the same place
MARKER = "\n[... cut to fit ...]\n"
#: a cut moves this many characters at most to fall between two words
SNAP = 24

#: prompt -> its exact tokens
Count = Callable[[Any], Awaitable[int]]


async def shorten(prompt: Any, tokens: int, budget: int, policy: str, count: Count) -> tuple[Any, int] | None:
    """(a prompt of at most ``budget`` tokens, its tokens), None when this policy cannot reach the budget.

    prompt: text, token ids, or a list of messages (or items of ``/v1/responses``). tokens: its exact count.
    """
    if tokens <= budget:
        return prompt, tokens
    if policy == REJECT or budget < 1:
        return None
    if isinstance(prompt, str):
        return await _cut_text(prompt, tokens, budget, count) if policy == MIDDLE_OUT else None
    if prompt and isinstance(prompt[0], int):
        if policy != MIDDLE_OUT:
            return None
        head = (budget + 1) // 2
        return [*prompt[:head], *prompt[len(prompt) - (budget - head) :]], budget
    kept, left = await _drop_turns(prompt, tokens, budget, count)
    if left <= budget:
        return kept, left
    if policy != MIDDLE_OUT:
        return None
    return await _cut_users(kept, left, budget, count)


def turns(messages: list[Any]) -> list[list[int]]:
    """Indices of the droppable messages by turn: from one user message to before the next.

    System and developer messages belong to no turn.
    """
    found: list[list[int]] = []
    for index, message in enumerate(messages):
        role = message.get("role") if isinstance(message, dict) else None
        if role in ("system", "developer"):
            continue
        if role == "user" or not found:
            found.append([])
        found[-1].append(index)
    return found


async def _drop_turns(messages: list[Any], tokens: int, budget: int, count: Count) -> tuple[list[Any], int]:
    """Without as few of the oldest turns as needed; the last one stays even when that is not enough."""
    groups = turns(messages)
    if len(groups) < 2:
        return messages, tokens

    def without(number: int) -> list[Any]:
        gone = {index for group in groups[:number] for index in group}
        return [message for index, message in enumerate(messages) if index not in gone]

    low, high = 1, len(groups) - 1
    best = (without(high), await count(without(high)))
    if best[1] > budget:
        return best
    while low < high:
        middle = (low + high) // 2
        trial = without(middle)
        left = await count(trial)
        if left <= budget:
            best, high = (trial, left), middle
        else:
            low = middle + 1
    return best


async def _cut_users(
    messages: list[Any], tokens: int, budget: int, count: Count
) -> tuple[list[Any], int] | None:
    """Cut user texts, the longest first, until the whole fits."""
    places = sorted(_user_texts(messages), key=lambda place: -len(_text_at(messages, place)))
    for place in places:

        async def counted(
            text: str, place: tuple[int, int | None] = place, messages: list[Any] = messages
        ) -> int:
            return await count(_with_text(messages, place, text))

        text = _text_at(messages, place)
        cut = await _cut_text(text, tokens, budget, counted)
        if cut is not None:
            return _with_text(messages, place, cut[0]), cut[1]
        # Even an empty text does not do: leave the marker and go on with the next.
        emptied = _with_text(messages, place, MARKER)
        left = await count(emptied)
        if left < tokens:
            messages, tokens = emptied, left
    return None


def _user_texts(messages: list[Any]) -> list[tuple[int, int | None]]:
    """(message, part or None) of every text of a user."""
    found: list[tuple[int, int | None]] = []
    for index, message in enumerate(messages):
        if not isinstance(message, dict) or message.get("role") != "user":
            continue
        content = message.get("content")
        if isinstance(content, str):
            found.append((index, None))
        elif isinstance(content, list):
            found += [
                (index, number)
                for number, part in enumerate(content)
                if isinstance(part, dict) and isinstance(part.get("text"), str)
            ]
    return found


def _text_at(messages: list[Any], place: tuple[int, int | None]) -> str:
    content = messages[place[0]]["content"]
    text: str = content if place[1] is None else content[place[1]]["text"]
    return text


def _with_text(messages: list[Any], place: tuple[int, int | None], text: str) -> list[Any]:
    message = dict(messages[place[0]])
    if place[1] is None:
        message["content"] = text
    else:
        parts = list(message["content"])
        parts[place[1]] = {**parts[place[1]], "text": text}
        message["content"] = parts
    return [*messages[: place[0]], message, *messages[place[0] + 1 :]]


async def _cut_text(
    text: str, tokens: int, budget: int, count: Callable[[str], Awaitable[int]]
) -> tuple[str, int] | None:
    """The text with its middle out, as long as the budget allows; None when no cut is enough.

    Looks for the largest kept length by bisection, its first guess by the tokens per character seen.
    """
    low, high = 0, len(text)  # kept characters: low fits (once tried), high does not
    best: tuple[str, int] | None = None
    guess = max(0, len(text) - int((tokens - budget) * len(text) / max(1, tokens) * 1.02) - len(MARKER))
    for _ in range(40):
        trial = middle_out(text, guess)
        left = await count(trial)
        if left <= budget:
            best, low = (trial, left), guess
            if budget - left <= max(1, budget // 200):
                break
        else:
            high = guess
            if guess == 0:
                return None
        if high - low <= 1:
            break
        guess = low if best is None else (low + high) // 2
        if best is not None and left <= budget:
            # Close to the budget already: what the missing tokens are worth, at the rate seen.
            guess = min(high - 1, low + max(1, int((budget - left) * len(trial) / max(1, left))))
        elif best is None:
            guess = max(0, min(high - 1, high * 9 // 10 if high < len(text) else high // 2))
    return best


def middle_out(text: str, keep: int) -> str:
    """``keep`` characters of a text, from its two ends, with the marker between them."""
    if keep >= len(text):
        return text
    head, _, tail = text.partition(MARKER)
    if tail and len(head) + len(tail) > keep:
        half = (keep + 1) // 2
        left = head[: min(len(head), max(half, keep - len(tail)))]
        right = tail[max(0, len(tail) - (keep - len(left))) :]
        return left + MARKER + right
    half = (keep + 1) // 2
    stop, start = half, len(text) - (keep - half)
    space = text.rfind(" ", max(0, stop - SNAP), stop)
    stop = space if space > 0 else stop
    space = text.find(" ", start, min(len(text), start + SNAP))
    start = space + 1 if space >= 0 else start
    return text[:stop] + MARKER + text[start:]
