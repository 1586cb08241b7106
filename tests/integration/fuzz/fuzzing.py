"""Feed mutated inputs to a target for some seconds, and keep those whose outcome is new.

A target is a function of bytes that raises on a broken promise and returns a short outcome. An input with an
outcome that was not seen before joins the corpus of the run, so that mutations go on from there. A failing
input is shortened, and belongs into the corpus of its target.
"""

import contextlib
import gc
import random
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field

MAX_INPUT_BYTES = 65_536
MAX_KEPT = 2_000
MAX_TURN_S = 0.02
"""Processor time that one input may take: everybody else waits so long."""
_SHORTEN_S = 3.0

Target = Callable[[bytes], Hashable]


class SlowTurnError(AssertionError):
    """One turn of the event loop took longer than `MAX_TURN_S`."""


@contextlib.contextmanager
def limit_turn() -> Iterator[None]:
    """What a target does in here is one turn of the router's event loop, whose processor time is limited.

    Collections of garbage are not part of it: the run has them off.
    """
    began_s = time.thread_time()
    yield
    took_s = time.thread_time() - began_s
    if took_s > MAX_TURN_S:
        raise SlowTurnError(f"{took_s * 1e3:.0f} ms")


@dataclass
class Fuzzer:
    """One run.

    Args:
        target: Function under test.
        corpus: Inputs to begin with; each is also run unchanged.
        tokens: Pieces that mean something to the target.
    """

    target: Target
    corpus: Sequence[bytes]
    tokens: Sequence[bytes]
    rng: random.Random
    outcomes: set[Hashable] = field(default_factory=set)
    inputs: int = 0

    def run(self, seconds: float) -> str:
        """Run for so many seconds; return what was run.

        Raises:
            AssertionError: with the input that broke a promise.
        """
        kept = list(self.corpus)
        gc.collect()
        gc.disable()  # a collection of pytest's objects takes longer than any input may
        try:
            for data in self.corpus:
                self._try(data)
            end_s = time.monotonic() + seconds
            while time.monotonic() < end_s:
                data = self.mutate(self.rng.choice(kept), kept)
                if self._try(data) and len(kept) < MAX_KEPT:
                    kept.append(data)
        finally:
            gc.enable()
        return f"{self.inputs} inputs, {len(self.outcomes)} outcomes"

    def _try(self, data: bytes) -> bool:
        """Run one input; return whether its outcome is new."""
        self.inputs += 1
        if not self.inputs % 5_000:
            gc.collect()
        try:
            outcome = self._run_target(data)
        except Exception as error:
            short = self._shorten(data, type(error))
            raise AssertionError(f"{type(error).__name__}: {error}\ninput: {short[:3_000]!r}") from error
        is_new = outcome not in self.outcomes
        self.outcomes.add(outcome)
        return is_new

    def _run_target(self, data: bytes) -> Hashable:
        try:
            return self.target(data)
        except SlowTurnError:  # the first time may have paid for something else
            return self.target(data)

    def _shorten(self, data: bytes, kind: type[Exception]) -> bytes:
        """Remove what is not needed for the same kind of failure."""
        end_s = time.monotonic() + _SHORTEN_S
        size = len(data) // 2
        while size and time.monotonic() < end_s:
            for start in range(0, len(data), size):
                shorter = data[:start] + data[start + size :]
                if self._fails(shorter, kind):
                    data = shorter
                    break
            else:
                size //= 2
        return data

    def _fails(self, data: bytes, kind: type[Exception]) -> bool:
        try:
            self._run_target(data)
        except kind:
            return True
        except Exception:
            return False
        return False

    def mutate(self, data: bytes, others: Sequence[bytes]) -> bytes:
        """Change an input in one to four places."""
        for _ in range(self.rng.randint(1, 4)):
            data = self._mutate_once(data, others)
        return data[:MAX_INPUT_BYTES]

    def _mutate_once(self, data: bytes, others: Sequence[bytes]) -> bytes:
        rng = self.rng
        at = rng.randrange(len(data) + 1)
        to = min(len(data), at + int(rng.expovariate(1 / 8)))
        match rng.randrange(9):
            case 0:
                return data[:at] + rng.choice(self.tokens) + data[at:]
            case 1:
                return data[:at] + rng.choice(self.tokens) + data[to:]
            case 2:
                return data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :]
            case 3:
                return data[:at] + bytes([rng.randrange(256)]) + data[at:]
            case 4:
                return data[:at] + data[to:]
            case 5:
                return data[:to] + data[at:to] * rng.randint(1, 3) + data[to:]
            case 6:
                other = rng.choice(others)
                return data[:at] + other[rng.randrange(len(other) + 1) :]
            case 7:
                return data.replace(*rng.choice(_SPELLINGS))
            case _:
                return data + rng.choice(others)


_SPELLINGS = (
    (b"\r\n", b"\n"),
    (b"\r\n", b"\r"),
    (b": ", b" : "),
    (b": ", b":\t"),
    (b"\r\n\r\n", b"\r\n \r\n"),
    (b"HTTP/1.1", b"HTTP/1.0"),
    (b"chunked", b"Chunked"),
    (b"data: ", b"data:"),
    (b":", b" : "),
)


def split_randomly(data: bytes, rng: random.Random) -> list[bytes]:
    """Split an input as a network might."""
    cuts = sorted(rng.randrange(len(data) + 1) for _ in range(rng.randint(0, 6)))
    pieces = [data[start:end] for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True)]
    return [piece for piece in pieces if piece]
