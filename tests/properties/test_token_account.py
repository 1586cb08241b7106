"""The account of one request: whatever happens to it, its tenant pays once, and for what it has used."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fulcrum_router.policy.ledger import DecodeEntry, Ledger
from fulcrum_router.policy.tiers.rate_limits import TokenBuckets
from fulcrum_router.policy.tiers.token_account import TokenAccount, Tokens

COUNTS = st.integers(0, 5_000)
LIMIT = 1_000_000


class Accounts(RuleBasedStateMachine):
    """One request, in any order of events, and the bucket of its tenant."""

    @initialize(prompt=st.integers(1, 5_000), expected=st.integers(0, 500), most=st.integers(500, 2_000))
    def open(self, prompt: int, expected: int, most: int) -> None:
        self.account = TokenAccount(Tokens(prompt, expected), output_max=most)
        self.most = most
        self.buckets = TokenBuckets(LIMIT)
        self.buckets.take("acme", self.account.taken.total, 0.0)
        self.ledger = Ledger()
        self.entry: DecodeEntry | None = None
        self.sent, self.prompt = False, float(prompt)
        self.ended: list[int] = []
        """Output of the legs that have ended."""
        self.is_known = True
        self.settled: list[Tokens] = []

    @property
    def seen(self) -> int:
        return 0 if self.entry is None else self.entry.output_tokens

    @precondition(lambda self: not self.settled)
    @rule()
    def a_prefill_leg_is_sent(self) -> None:
        self.account.send()
        self.sent = True

    @precondition(lambda self: self.sent and not self.settled)
    @rule(tokens=COUNTS)
    def an_engine_counts_the_prompt(self, tokens: int) -> None:
        self.account.count_prompt(tokens)
        self.prompt = tokens

    @precondition(lambda self: not self.settled)
    @rule()
    def a_decode_leg_is_sent(self) -> None:
        if self.entry is not None:
            self.ended.append(self.seen)
        entry = self.entry = self.ledger.add_decode(tokens=1)
        self.account.follow(entry)
        self.sent = self.is_known = True

    @precondition(lambda self: self.entry is not None and not self.settled)
    @rule(tokens=st.integers(0, 400))
    def output_appears(self, tokens: int) -> None:
        assert self.entry is not None
        self.entry.add_tokens(tokens)

    @precondition(lambda self: self.entry is not None and not self.settled)
    @rule(counted=st.none() | COUNTS)
    def a_decode_leg_ends(self, counted: int | None) -> None:
        if counted is None:
            self.is_known = self.seen > 0
            self.ended.append(self.seen)
        else:
            self.ended.append(min(counted, max(self.most - sum(self.ended), self.seen)))
        assert self.entry is not None
        self.entry.release()
        self.entry = None
        self.account.end_leg(counted)

    @rule(served=st.booleans())
    def the_request_ends(self, *, served: bool) -> None:
        used = self.account.settle(served=served)
        assert (used is None) == bool(self.settled), "settled once"
        if used is None:
            return
        self.settled.append(used)
        if self.entry is not None:
            self.is_known = self.seen > 0
            self.ended.append(self.seen)
        least = sum(self.ended)
        expected = Tokens(self.prompt, least if self.is_known else max(least, self.account.taken.output))
        assert used == (expected if served and self.sent else Tokens())
        self.buckets.give_back("acme", self.account.taken.total - used.total, 0.0)
        assert self.buckets.take("acme", LIMIT, 0.0) * LIMIT / 60 == pytest.approx(used.total)

    @invariant()
    def what_is_due_covers_what_was_seen_and_what_was_taken(self) -> None:
        if not hasattr(self, "account") or self.settled:
            return
        due = self.account.weigh_due(1.0, 1e-6), self.account.weigh_due(1e-6, 1.0)
        output = max(self.account.taken.output, sum(self.ended) + self.seen)
        assert due == (self.prompt + 1e-6 * output, 1e-6 * self.prompt + output)

    @invariant()
    def nobody_gets_back_more_than_was_taken(self) -> None:
        for used in self.settled if hasattr(self, "settled") else ():
            assert min(used) >= 0
            assert self.account.taken.total - used.total <= self.account.taken.total


TestAccounts = Accounts.TestCase
TestAccounts.settings = settings(max_examples=200, stateful_step_count=20)
