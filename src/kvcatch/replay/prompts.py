"""Prompts of token ids that share what a workload's requests shared; no text is needed, and none is known.

A segment's tokens follow from its id and the seed alone, so equal prefixes become equal tokens and nothing else
does. What an engine generates cannot be made up beforehand: a later prompt that quotes it takes the tokens that came
back (``learn``), so that the blocks of an earlier answer are hit again.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvcatch.workload import Workload

Ints = npt.NDArray[np.int64]
_STEP = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


class PromptBook:
    """The prompts of a workload in an engine's own token ids.

    Args:
        workload: what to send.
        alphabet: token ids to choose from; at least two.
        seed: another seed gives other tokens, so that a second run does not hit what the first one left behind.
    """

    def __init__(self, workload: Workload, alphabet: Ints, seed: int) -> None:
        self.workload = workload
        self._size = np.uint64(len(alphabet))
        self._tokens = np.asarray(alphabet, np.int64)
        self._places = {int(token): place for place, token in enumerate(self._tokens)}
        self._words = _words(self._tokens)
        self._seed = np.uint64((seed * _STEP) & _MASK)
        self._learned: dict[int, Ints] = {}
        #: segments of prompts that some request generated -> that request
        self._quoted = _quoted(workload)
        #: prompts sent that quote an answer which never came
        self.unanswered = 0

    @property
    def wants_answers(self) -> bool:
        """Whether some prompt quotes what was generated, so that ``learn`` should be called."""
        return bool(self._quoted)

    def quotes(self, request: int) -> tuple[int, ...]:
        """Earlier requests whose answers this prompt quotes."""
        if not self._quoted:
            return ()
        workload = self.workload
        ids = workload.segment_ids[workload.offsets[request] : workload.offsets[request + 1]].tolist()
        return tuple(sorted({made for one in ids if (made := self._quoted.get(one, request)) < request}))

    def _places_of(self, request: int) -> tuple[Ints, bool]:
        """Places in ``_tokens`` of one prompt, and whether an answer that it quotes is not known."""
        workload = self.workload
        first, last = workload.offsets[request], workload.offsets[request + 1]
        ids, lengths = workload.segment_ids[first:last], workload.segment_tokens[first:last]
        ends = np.cumsum(lengths)
        within = (np.arange(ends[-1]) - np.repeat(ends - lengths, lengths)).astype(np.uint64)
        mixed = _mix(_mix(np.repeat(ids, lengths).astype(np.uint64) ^ self._seed) + within)
        places = (mixed % self._size).astype(np.int64)
        late = False
        if self._quoted:
            for identity, end, length in zip(ids.tolist(), ends.tolist(), lengths.tolist(), strict=True):
                if identity in self._quoted:
                    known = self._learned.get(identity)
                    late |= known is None
                    if known is not None:
                        places[end - length : end] = known
        return places, late

    def ids(self, request: int) -> Ints:
        """Token ids of one prompt."""
        return self._tokens[self._places_of(request)[0]]

    def json(self, request: int) -> bytes:
        """The prompt as a JSON list, to be sent now."""
        places, late = self._places_of(request)
        self.unanswered += late
        return b"[" + self._words[places].tobytes()[:-1] + b"]"

    def learn(self, request: int, output: list[int]) -> None:
        """What came back for a request: later prompts that quote it will carry these tokens."""
        workload = self.workload
        if workload.made_offsets is None or workload.made_ids is None:
            return
        first, last = int(workload.made_offsets[request]), int(workload.made_offsets[request + 1])
        wanted = [(n, int(workload.made_ids[first + n])) for n in range(last - first)]
        wanted = [(n, identity) for n, identity in wanted if identity in self._quoted]
        if not wanted:
            return
        grain = workload.grain
        whole = int(workload.prompt_tokens[request]) // grain
        answer = np.array([self._place(token) for token in output], np.int64)
        everything = np.concatenate([self._places_of(request)[0], answer])
        for n, identity in wanted:
            piece = everything[(whole + n) * grain : (whole + n + 1) * grain]
            if len(piece) == grain:
                self._learned[identity] = piece

    def _place(self, token: int) -> int:
        """The place of a token; one that is not in the alphabet is added after it."""
        place = self._places.get(token)
        if place is None:
            place = self._places[token] = len(self._tokens)
            self._tokens = np.append(self._tokens, token)
            self._words = _words(self._tokens)
        return place


def _quoted(workload: Workload) -> dict[int, int]:
    if workload.made_ids is None or workload.made_offsets is None:
        return {}
    known = set(np.intersect1d(workload.made_ids, workload.segment_ids).tolist())
    makers = np.repeat(np.arange(len(workload)), np.diff(workload.made_offsets))
    found: dict[int, int] = {}
    for identity, maker in zip(workload.made_ids.tolist(), makers.tolist(), strict=True):
        if identity in known:
            found.setdefault(identity, maker)
    return found


def _words(tokens: Ints) -> npt.NDArray[np.bytes_]:
    """Every token as text of one width, so that a prompt is one lookup, whatever its length."""
    width = len(str(int(tokens.max()))) + 1
    return np.array([f"{token},".rjust(width).encode() for token in tokens.tolist()])


def _mix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """SplitMix64's finaliser (Steele, Lea and Flood, OOPSLA 2014): every bit depends on every other."""
    with np.errstate(over="ignore"):
        values = values + np.uint64(_STEP)
        values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed: npt.NDArray[np.uint64] = values ^ (values >> np.uint64(31))
        return mixed
