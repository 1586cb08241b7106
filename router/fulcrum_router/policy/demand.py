"""The work that clients ask for: sums since the router started, from which the autoscaler forecasts.

`JourneyContext.record_admitted` decides what counts: no refused or hopeless request, and of a very long
prompt only a part. Two snapshots of the sums give the rates between them, whoever takes them and how often.
The output of a request is predicted when it arrives: from the answers to earlier prompts of its tenant and of
its length. The state port reports the sums. Work that no engine has to do any more is withdrawn: a client
that sends requests and leaves at once must not move the instances that others need.
"""

import math
from collections import OrderedDict
from typing import NamedTuple

from fulcrum_core.router_state import DemandState, DemandSums
from fulcrum_router.policy.ledger import DecodeEntry

DEFAULT_OUTPUT_TOKENS = 100.0
"""Prediction before the first answer."""
_WEIGHT = 0.02
"""Weight of the latest answer; the first ones count equally."""
_KNOWN_FROM = 64
"""Complete answers from which the answers in decode are no longer needed to know their mean length."""
_KEYS_MAX = 4_096
"""Pairs of tenant and prompt length that are remembered; the ones not used for longest are dropped."""


class OutputLengths:
    """Mean output tokens by tenant and range of prompt lengths; there are two ranges to a power of two.

    A prompt length without any answers yet gets the mean over all. Short answers end first: while few have
    ended, those in decode count, too, with twice their output so far, if that makes the mean longer.
    """

    __slots__ = ("_all", "_by_key", "_in_decode", "_served", "_served_squares")

    def __init__(self) -> None:
        self._all = (0, DEFAULT_OUTPUT_TOKENS)
        self._served = (0, DEFAULT_OUTPUT_TOKENS)
        self._served_squares = (0, DEFAULT_OUTPUT_TOKENS**2)
        self._by_key: OrderedDict[tuple[str, int], tuple[int, float]] = OrderedDict()
        self._in_decode: dict[tuple[str, int], dict[DecodeEntry, None]] = {}
        """Answers in decode, where few have ended: at most `_KNOWN_FROM` of a key."""

    @property
    def mean_served(self) -> float:
        """Mean over all answers, also those that admission cut short."""
        return self._served[1]

    @property
    def mean_in_decode(self) -> float:
        """Mean final length of the answers in decode at one time: Σo² / Σo over all answers of o tokens.

        An answer is in decode for a time in proportion to its length, so that long ones are found there more
        often than they are sent.
        """
        mean = self._served[1]
        return self._served_squares[1] / mean if mean else 0.0

    def record_served(self, output_tokens: int) -> None:
        """Count an answer in `mean_served` and `mean_in_decode`."""
        self._served = _update(self._served, output_tokens)
        self._served_squares = _update(self._served_squares, output_tokens**2)

    def predict(self, tenant: str, prompt_tokens: int) -> float:
        """Predict the output tokens of a request."""
        key = tenant, _find_bucket(prompt_tokens)
        count, mean = self._by_key.get(key, (0, self._all[1]))
        in_decode = self._in_decode.get(key)
        if not in_decode or count >= _KNOWN_FROM:
            return mean
        output = sum(entry.output_tokens for entry in in_decode)
        return max(mean, (count * mean + 2 * output) / (count + len(in_decode)))

    def follow(self, tenant: str, prompt_tokens: int, entry: DecodeEntry) -> None:
        """An answer begins; `entry` counts its output as it appears."""
        key = tenant, _find_bucket(prompt_tokens)
        if self._by_key.get(key, (0, 0.0))[0] < _KNOWN_FROM:
            in_decode = self._in_decode.setdefault(key, {})
            if len(in_decode) < _KNOWN_FROM:
                in_decode[entry] = None

    def forget(self, tenant: str, prompt_tokens: int, entry: DecodeEntry) -> None:
        """An answer that was followed has ended; no effect on others."""
        key = tenant, _find_bucket(prompt_tokens)
        in_decode = self._in_decode.get(key)
        if in_decode is not None:
            in_decode.pop(entry, None)
            if not in_decode:
                del self._in_decode[key]

    def learn(self, tenant: str, prompt_tokens: int, output_tokens: int) -> None:
        """Learn from a complete answer."""
        key = tenant, _find_bucket(prompt_tokens)
        self._all = _update(self._all, output_tokens)
        self._by_key[key] = _update(self._by_key.pop(key, (0, 0.0)), output_tokens)
        if len(self._by_key) > _KEYS_MAX:
            self._by_key.popitem(last=False)


def _find_bucket(prompt_tokens: int) -> int:
    """Number the ranges of prompt lengths from a power of two to one and a half of it, and to the next."""
    exponent = prompt_tokens.bit_length()
    return 2 * exponent + (4 * prompt_tokens >= 3 << exponent)


def _update(mean: tuple[int, float], value: float) -> tuple[int, float]:
    count, before = mean[0] + 1, mean[1]
    weight = 1.0 / count
    if weight < _WEIGHT:
        weight = _WEIGHT
    return count, before + weight * (value - before)


class CountedWork(NamedTuple):
    """What one request has added to the sums."""

    prefill_s: float
    output_tokens: float
    token_steps: float


class _Sums:
    """Sums over some requests."""

    __slots__ = ("output_tokens", "prefill_s", "requests", "token_steps")

    def __init__(self) -> None:
        self.requests = 0
        self.prefill_s = self.output_tokens = self.token_steps = 0.0

    def add(self, work: CountedWork) -> None:
        self.requests += 1
        self.prefill_s += work.prefill_s
        self.output_tokens += work.output_tokens
        self.token_steps += work.token_steps

    def snapshot(self) -> dict[str, float]:
        return {
            "requests": self.requests,
            "prefill_s": self.prefill_s,
            "output_tokens": self.output_tokens,
            "token_steps": self.token_steps,
        }


class Demand:
    """Sums over the counted requests since the router started."""

    __slots__ = ("_counted", "_withdrawn", "lengths")

    def __init__(self) -> None:
        self.lengths = OutputLengths()
        self._counted, self._withdrawn = _Sums(), _Sums()

    def record(self, *, tenant: str, prompt_tokens: int, prefill_s: float) -> CountedWork:
        """Count a request that will be served; `prefill_s` is the predicted time to compute its prompt."""
        output = self.lengths.predict(tenant, prompt_tokens)
        work = CountedWork(
            prefill_s if prefill_s < math.inf else 0.0, output, output * (prompt_tokens + output / 2)
        )
        self._counted.add(work)
        return work

    def withdraw(self, work: CountedWork) -> None:
        """The request that has added this is not going to be served."""
        self._withdrawn.add(work)

    def snapshot(self) -> DemandState:
        """Return the sums so far."""
        withdrawn = DemandSums.model_validate(self._withdrawn.snapshot())
        return DemandState.model_validate({**self._counted.snapshot(), "withdrawn": withdrawn})
