"""The work that one client request asks of the instances, as dispatch and the journey read it: a plain value.

The data path measures the request and makes the Work; `dispatch` chooses instances for it. It holds no text
of the prompt, only lengths and hashes.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from fulcrum_core.values import Slo
from fulcrum_router.policy.prefix_index import NO_PREFIX, PromptPrefix

NOT_CACHED: Mapping[str, int] = MappingProxyType({})
"""No instance is known to hold a part of the prompt in its prefix cache."""


class Work(NamedTuple):
    """One client request as work. A named tuple: frozen, and made in a third of a dataclass's time."""

    prompt_tokens: int
    """Tokens of all prompts of the request together; an estimate until an engine has counted them."""
    slo: Slo
    """Objectives of the request's tier."""
    deadline_s: float
    """Time on the monotonic clock by which the first byte must reach the client: arrival + TTFT objective."""
    output_limit: int = 0
    """Output tokens that the client allows for each choice; 0: not known."""
    cached_tokens: Mapping[str, int] = NOT_CACHED
    """Prompt tokens in the prefix cache of an instance, by its name; instances without any are left out."""
    tier: str = ""
    """Name of the QoS tier."""
    priority: int = 0
    """Priority of the tier; higher is more important."""
    tenant: str = ""
    """Tenant that sent the request; empty: unknown."""
    choices: int = 1
    """Texts that the engine generates, over all prompts: `n` for each of them."""
    prompts: int = 1
    """Number of prompts. Each has `choices / prompts` choices."""
    prefix: PromptPrefix = NO_PREFIX
    """The beginning of the prompt, to find it in prefix caches."""
    is_streamed: bool = False
    """Whether the client asked for a stream; False: its first token is not seen, or it is passed through."""

    @property
    def arrival_s(self) -> float:
        """Arrival of the request on the monotonic clock."""
        return self.deadline_s - self.slo.ttft_s

    @property
    def context_tokens(self) -> int:
        """Prompt tokens that decode reads in each step: a prompt with n choices counts n times, though its KV
        is stored once."""
        return self.prompt_tokens * self.choices // self.prompts

    def count_computed(self, instance: str) -> int:
        """Return the prompt tokens that this instance computes: those that it has not cached."""
        tokens, cached = self.prompt_tokens, self.cached_tokens
        return max(0, tokens - cached.get(instance, 0)) if cached else tokens

    @property
    def least_computed(self) -> int:
        """Prompt tokens that the instance computes that has most of them cached."""
        tokens, cached = self.prompt_tokens, self.cached_tokens
        return max(0, tokens - max(cached.values())) if cached else tokens

    def with_prompt_tokens(self, prompt_tokens: int) -> "Work":
        """The same work with a counted prompt."""
        return self if prompt_tokens == self.prompt_tokens else Work(prompt_tokens, *self[1:])
