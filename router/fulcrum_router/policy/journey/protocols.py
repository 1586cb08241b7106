"""KV transfer protocols: in which order the two legs of a request start, and what each needs of the other.

The protocol follows from the connector in the identity of the prefill instance. Only vLLM's NIXL pull has an
implementation in the data path. The other fields name what known protocols differ in, so that one more
protocol is one more row:

    SGLang's bootstrap room        both legs start at once and meet in a room: `legs_at_once`
    LMCache, prefill pushes        the prefill leg names its decode instance: `decode_chosen_first`
    KV of an earlier turn          the prefill leg fetches it from that turn's instance: `fetches_cached`
"""

from collections.abc import Mapping
from dataclasses import dataclass

from fulcrum_core.values import EngineIdentity


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferProtocol:
    """One way to bring a prompt's KV from a prefill instance to a decode instance."""

    name: str
    decode_chosen_first: bool = False
    """Whether the decode instance is chosen, and its capacity reserved, before the prefill leg is sent."""
    legs_at_once: bool = False
    """Whether both legs are sent together; the decode instance is then chosen first, too."""
    params_in_response: bool = True
    """Whether the prefill response has parameters without which the decode leg cannot fetch the KV."""
    leased: bool = True
    """Whether the prefill engine frees KV that is not fetched in time."""
    fetches_cached: bool = False
    """Whether the prefill leg may fetch the KV of an earlier turn from the instance that decoded it."""


NIXL_PULL = TransferProtocol(name="nixl_pull")
"""The decode instance fetches the KV with parameters of the prefill response, while its lease lasts."""

PROTOCOLS: Mapping[str, TransferProtocol] = {}
"""Protocols by `EngineIdentity.connector`: none yet. Any other connector uses `NIXL_PULL`."""


def find_protocol(
    protocols: Mapping[str, TransferProtocol], identity: EngineIdentity | None
) -> TransferProtocol:
    """Return the protocol of an engine; unknown engines use `NIXL_PULL`."""
    if identity is None or not protocols:
        return NIXL_PULL
    return protocols.get(identity.connector, NIXL_PULL)
