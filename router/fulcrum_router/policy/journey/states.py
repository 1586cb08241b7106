"""The vocabulary of the journey: states, actions, and the reasons that clients and metrics show."""

from enum import Enum, StrEnum


class State(Enum):
    """Where a request is. A request without KV transfer skips `PREFILL`."""

    ARRIVED = "arrived"
    WAITING = "waiting"
    """The request is in the waiting room, because every prefill instance has enough work."""
    FLIP_REQUESTED = "flip_requested"
    """Waiting for the flip that it asked for."""
    PREFILL = "prefill"
    """The prefill leg was sent."""
    DECODE_SENT = "decode_sent"
    """The decode leg was sent; nothing of its response has reached the client."""
    DECODE = "decode"
    """The client has the first byte: another instance can only continue the response."""
    ABORTING = "aborting"
    """Legs in flight are aborted before the request goes on or ends."""
    DONE = "done"


class Action(Enum):
    """What the interpreter of a journey has to do next."""

    SEND_PREFILL = "send_prefill"
    """Send the prefill leg to `Journey.prefill_instance`."""
    SEND_DECODE = "send_decode"
    """Send the decode leg to `Journey.decode_instance`."""
    SEND_BOTH = "send_both"
    """Send both legs, each to its instance."""
    ASK_FOR_FLIP = "ask_for_flip"
    """Publish `Journey.proposal`; call `flip_done` at the next assignment or `flip_wait_ended` at
    `wait_until_s`."""
    WAIT = "wait"
    """Do nothing: the waiting room calls `Journey.on_moved`, or a leg in flight has its next event."""
    ABORT_LEGS = "abort_legs"
    """Abort every leg in flight, then call `proceed`."""
    FAIL = "fail"
    """Send the client an error for `Journey.stop_reason` and `Journey.failure`."""
    BREAK = "break"
    """End the response that the client has a part of with an error."""
    END = "end"
    """Nothing more: the request is done."""


class StopReason(StrEnum):
    """Why a request is not tried again."""

    NO_INSTANCE = "no_instance"
    """No further instance can take it."""
    ATTEMPTS = "attempts"
    """All attempts that one request may have were made, and failed."""
    QUERY_OF_DEATH = "query_of_death"
    """Two engines or more closed the connection, died or answered 5xx after they were sent the request."""
    RETRY_BUDGET = "retry_budget"
    """The retries of all requests have used up the router's budget."""
    TOO_LONG = "too_long"
    """The engine worked on the response for longer than its tokens allow; another one would, too."""
    FULL = "full"
    """The waiting room is full."""
    REFUSED = "refused"
    """Admission or the rate limit of its tenant refused the request; see `Journey.refusal`."""

    __hash__ = str.__hash__  # counted on the data path: an enum's own hash is a Python call


class LocalPrefillReason(StrEnum):
    """Why a decode instance computes the prompt itself: metric label and `x-fulcrum-local-prefill` header."""

    MULTIPLE_PROMPTS = "multiple_prompts"
    MULTIPLE_CHOICES = "multiple_choices"
    """Several answers (`n`, `best_of`) or a beam search."""
    PROMPT_LOGPROBS = "prompt_logprobs"
    """The engine computes the whole prompt to return its log-probabilities, and uses no KV of another."""
    TRUNCATED_PROMPT = "truncated_prompt"
    """The engine truncates the prompt to what `max_tokens` leaves, which is not the same in both legs."""
    PROMPT_EMBEDS = "prompt_embeds"
    """The prompt has no tokens that a KV transfer could be counted by."""
    PASSED_THROUGH = "passed_through"
    """The API of the request has no KV transfer."""
    NO_PREFILL_INSTANCE = "no_prefill_instance"
    PREFILL_FAILED = "prefill_failed"
    KV_TRANSFER_BROKEN = "kv_transfer_broken"
    """KV transfers from the remaining prefill instances fail."""
    INCOMPLETE_KV_TRANSFER_PARAMS = "incomplete_kv_transfer_params"
    WRONG_REMOTE_HOST = "wrong_remote_host"
    """The KV transfer parameters name another host than that of the prefill instance."""
    STALE_KV_TRANSFER = "stale_kv_transfer"
    """Too much of the lease had passed before the decode leg was sent."""
    LEASE_EXPIRED = "lease_expired"
    """The KV may have been fetched after its lease had expired; the prompt was recomputed."""
    UNREADABLE_KV = "unreadable_kv"
    """No decode instance can read the KV of the prefill instance."""
    DEFLECTED = "deflected"
    """No prefill instance would compute the prompt well in time, and a decode instance has time to spare."""
    CPU_POOL = "cpu_pool"
    """Accelerators would compute the prompt too late, and none can read the KV of the CPU instance."""

    __hash__ = str.__hash__  # see StopReason

    @property
    def is_expected(self) -> bool:
        """Whether the reason lies in the request or in the load, and not in a failure."""
        return self in _EXPECTED_REASONS


_EXPECTED_REASONS = frozenset(
    {
        LocalPrefillReason.MULTIPLE_PROMPTS,
        LocalPrefillReason.MULTIPLE_CHOICES,
        LocalPrefillReason.PROMPT_LOGPROBS,
        LocalPrefillReason.TRUNCATED_PROMPT,
        LocalPrefillReason.PROMPT_EMBEDS,
        LocalPrefillReason.PASSED_THROUGH,
        LocalPrefillReason.DEFLECTED,
        LocalPrefillReason.CPU_POOL,
    }
)
