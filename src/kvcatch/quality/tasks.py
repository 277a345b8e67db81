"""Questions with one right answer, made by seed: needles by depth, key-value recall, arithmetic.

Many questions share one long beginning, so that an engine with prefix caching reads it once.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

import msgspec

KINDS = ("needle", "recall", "arithmetic")
DEPTHS = (0.1, 0.3, 0.5, 0.7, 0.9)
_NAMES = (
    "Amara", "Boris", "Chen", "Dalia", "Emil", "Farah", "Goran", "Hana", "Ivo", "Jana", "Kofi", "Lena",
    "Milan", "Nora", "Omar", "Petra", "Quentin", "Rosa", "Stefan", "Tara", "Uma", "Viktor", "Wanda", "Yusuf",
)  # fmt: skip
_THINGS = ("apple", "anchor", "basket", "bridge", "candle", "copper", "dragon", "engine", "feather", "garden", "hammer",
           "island", "jacket", "kettle", "ladder", "mirror", "needle", "orange", "pepper", "quartz")  # fmt: skip


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt and its answer.

    ``chance`` is what a guesser reaches who knows every value in the prompt; ``depth`` is where the needle lies, 0 to 1.
    """

    kind: str
    prompt: str
    answer: str
    chance: float
    group: int  # questions of one group share their text
    depth: float | None = None
    max_tokens: int = 8

    def right(self, text: str) -> bool:
        """Whether a continuation gives the answer first."""
        found = re.match(r"\s*(\w+)", text)
        return found is not None and found.group(1) == self.answer


def needles(texts: Sequence[str], groups: int, seed: int, characters: int = 1500) -> list[Question]:
    """Five secret numbers at five depths of a text, and a question for each."""
    rng = random.Random(f"needles {seed}")
    questions = []
    for group in range(groups):
        names = rng.sample(_NAMES, len(DEPTHS))
        codes = [str(code) for code in rng.sample(range(1000, 10000), len(DEPTHS))]
        base = texts[group % len(texts)][:characters]
        facts = [f" The code of {name} is {code}. " for name, code in zip(names, codes, strict=True)]
        document = _planted(base, facts)
        for name, code, depth in zip(names, codes, DEPTHS, strict=True):
            prompt = f"{document}\n\nQuestion: What is the code of {name}?\nAnswer: The code of {name} is"
            questions.append(
                Question(
                    kind="needle",
                    prompt=prompt,
                    answer=code,
                    chance=1 / len(DEPTHS),
                    group=group,
                    depth=depth,
                )
            )
    return questions


def _planted(text: str, facts: Sequence[str]) -> str:
    """The text with the facts at their depths, each after the end of a sentence where there is one."""
    parts, last = [], 0
    for depth, fact in zip(DEPTHS, facts, strict=True):
        want = int(depth * len(text))
        ends = [m.end() for m in re.finditer(r"[.。!?！？]", text) if m.end() > last]
        at = min(ends, key=lambda end: abs(end - want), default=want)
        parts += [text[last:at], fact]
        last = at
    return "".join([*parts, text[last:]])


def recall(groups: int, seed: int, pairs: int = 12, asked: int = 6) -> list[Question]:
    """A list of words with numbers; some of the words are asked again."""
    rng = random.Random(f"recall {seed}")
    questions = []
    for group in range(groups):
        words = rng.sample(_THINGS, pairs)
        numbers = [str(number) for number in rng.sample(range(100, 1000), pairs)]
        table = "\n".join(f"{word}: {number}" for word, number in zip(words, numbers, strict=True))
        for at in rng.sample(range(pairs), asked):
            prompt = f"Remember this list.\n{table}\n\nThe same list in another order.\n{words[at]}:"
            questions.append(
                Question(kind="recall", prompt=prompt, answer=numbers[at], chance=1 / pairs, group=group)
            )
    return questions


def arithmetic(count: int, seed: int) -> list[Question]:
    """Sums of two numbers after worked examples. Chance is the share of the commonest answer."""
    rng = random.Random(f"arithmetic {seed}")
    shown = [(rng.randrange(2, 30), rng.randrange(2, 30)) for _ in range(8)]
    examples = "".join(f"{a} + {b} = {a + b}\n" for a, b in shown)
    asked = [(rng.randrange(2, 30), rng.randrange(2, 30)) for _ in range(count)]
    sums = [a + b for a in range(2, 30) for b in range(2, 30)]
    chance = max(sums.count(value) for value in set(sums)) / len(sums)
    return [
        Question(
            kind="arithmetic",
            prompt=f"{examples}{a} + {b} =",
            answer=str(a + b),
            chance=chance,
            group=0,
            max_tokens=4,
        )
        for a, b in asked
    ]


def all_questions(texts: Sequence[str], size: int, seed: int) -> list[Question]:
    """The default set: per unit of ``size`` five needles, six recalls and six sums."""
    return [*needles(texts, size, seed), *recall(size, seed), *arithmetic(6 * size, seed)]
