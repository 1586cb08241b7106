"""The tokens of one request: how many were taken from its tenant, and how many it has used.

The rate limit and the fairness counters of the tenant are corrected by the same account, so that they agree.
Taken are the measured prompt and the expected output. Used are

    prompt    as measured, or as an engine counted it, once the first leg is sent
    output    of all legs, as far as it reached the client

Output without any count is used as far as it was taken: nobody knows how much of it was generated. That is so
for a response that is not streamed, and whose client leaves before its end. The journey of each request has
one (`journey.record`).
"""

from typing import NamedTuple

from fulcrum_router.policy.ledger import DecodeEntry


class Tokens(NamedTuple):
    """Tokens of a request, at least 0."""

    prompt: float = 0.0
    output: float = 0.0

    @property
    def total(self) -> float:
        """Prompt and output together."""
        return self.prompt + self.output


_NONE = Tokens()


class TokenAccount:
    """What one request has taken and used; it is settled once.

    Args:
        taken: The measured prompt and the expected output.
        output_max: Output tokens that the request may have; an engine's count above it is not believed.
    """

    __slots__ = (
        "_entry",
        "_is_counted",
        "_is_sent",
        "_is_settled",
        "_output",
        "_output_max",
        "_prompt",
        "taken",
    )

    def __init__(self, taken: Tokens, output_max: int) -> None:
        self.taken, self._output_max = taken, output_max
        self._prompt = taken[0]
        self._output = 0
        """Output of the decode legs that have ended."""
        self._entry: DecodeEntry | None = None
        """Counts the output of the decode leg in flight."""
        self._is_counted = True
        """Whether the output of the last decode leg that ended is known."""
        self._is_sent = self._is_settled = False

    def send(self) -> None:
        """A leg is sent: an engine may compute the prompt."""
        self._is_sent = True

    def count_prompt(self, tokens: int) -> None:
        """An engine has counted the prompt of the request, without output that was appended to continue."""
        self._prompt = float(tokens) if tokens > 0 else 0.0

    def follow(self, entry: DecodeEntry) -> None:
        """A decode leg is sent, whose output `entry` counts as it appears. It replaces the leg before."""
        if self._entry is not None:
            self._output += self._entry.output_tokens
        self._entry, self._is_sent, self._is_counted = entry, True, True

    def end_leg(self, output_tokens: int | None = None) -> None:
        """The decode leg has ended.

        Args:
            output_tokens: Its output as the engine counted it. None: it gave no count, and that of the ledger
                is used; if the ledger has counted no token, the output of the leg is not known.
        """
        entry, self._entry = self._entry, None
        seen = 0 if entry is None else entry.output_tokens
        if output_tokens is None:
            self._is_counted = seen > 0 or entry is None
            output_tokens = seen
        elif output_tokens > seen:
            output_tokens = min(output_tokens, max(self._output_max - self._output, seen))
        if output_tokens > 0:
            self._output += output_tokens

    def weigh_due(self, prompt_weight: float, output_weight: float) -> float:
        """Weigh what is owed while the request is served: its prompt, and the expected output or more.

        Called ten times a second for each request in flight.
        """
        entry, expected = self._entry, self.taken[1]
        output = self._output if entry is None else self._output + entry.output_tokens
        return prompt_weight * self._prompt + output_weight * (output if output > expected else expected)

    def predict_kv_in_use(self, output_tokens: float) -> float:
        """Predict the KV tokens that the request holds when its answer could have so many tokens more.

        An answer that is longer than expected is not expected to end: nothing says when it will.
        """
        entry, (prompt, expected) = self._entry, self.taken
        output = self._output if entry is None else self._output + entry.output_tokens
        if output <= expected:
            return 0.0 if expected <= output + output_tokens else prompt + expected
        return prompt + output

    def settle(self, *, served: bool) -> Tokens | None:
        """Close the account, and return the tokens that the request has used; None if it was closed before.

        A request that was not served has used none.
        """
        if self._is_settled:
            return None
        self._is_settled = True
        if self._entry is not None:
            self.end_leg()
        if not served or not self._is_sent:
            return _NONE
        return Tokens(self._prompt, self._output if self._is_counted else max(self._output, self.taken[1]))
