"""The longest prompt that the engines of a service take, beyond which a prompt counts as no longer.

The router measures a prompt by its bytes, and an engine rejects one that is too long only when it has counted
the tokens. Until then the prompt is in the ledgers. Counted whole, a body of 8 MB would be hours of prefill
work, so that admission would refuse what others send and a flip would follow. The journey caps each prompt
when the request arrives; the request itself is sent unchanged.
"""

from collections.abc import Iterable

from fulcrum_router.policy.instance_record import InstanceRecord
from fulcrum_router.policy.work import Work

ASSUMED_CONTEXT_TOKENS = 131_072
"""Assumed longest context of an engine that does not report one."""

SHORT_PROMPT_TOKENS = 512
"""Every engine takes a prompt of this length."""


def cap_prompt(work: Work, instances: Iterable[InstanceRecord]) -> Work:
    """Count each prompt of a request as at most the longest that any instance takes."""
    longest = 0
    for instance in instances:
        limit = work.prompts * find_longest_prompt(instance)
        if work.prompt_tokens <= limit:
            return work
        longest = max(longest, limit)
    return work.with_prompt_tokens(longest) if longest else work


def find_longest_prompt(instance: InstanceRecord) -> int:
    """The longest prompt that an instance takes, in tokens: its context, or its smaller KV cache."""
    context_tokens = instance.context_tokens or ASSUMED_CONTEXT_TOKENS
    return min(context_tokens, instance.kv_capacity_tokens or context_tokens)
