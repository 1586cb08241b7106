"""Settings of a service's routers: callers, waits for engines and for prefill, TLS and pods.

Part of a PDService's spec. The router resolves them in `fulcrum_router.settings`, the operator in its
manifests.
"""

from typing import Annotated, Self

from pydantic import ConfigDict, Field, StrictBool, StrictFloat, StrictInt, model_validator

from fulcrum_core.api.meta import ApiModel, Duration, cel_rule
from fulcrum_core.api.pod_template import PodTemplatePatch
from fulcrum_core.values import AdmissionMode, DispatchMode


class TimeoutsSpec(ApiModel):
    """Longest waits of the router for an engine."""

    connect: Duration = Field(default=1.0, gt=0, description="Longest wait for a connection (default 1s).")
    prefill: Duration = Field(
        default=60.0, gt=0, description="Longest wait for the response of a prefill leg (default 60s)."
    )
    first_byte: Duration = Field(
        default=60.0,
        gt=0,
        description="Longest wait for the first byte of a stream. A response that is not streamed may take "
        "0.5 s more for each output token, while its engine computes (default 60s).",
    )
    idle: Duration = Field(
        default=60.0,
        gt=0,
        description="Longest pause between two reads of a stream, not counting a slow client (default 60s).",
    )


class DispatchSpec(ApiModel):
    """Where requests wait for prefill."""

    mode: DispatchMode = Field(
        default=DispatchMode.QUEUE,
        description="Queue: a request waits in the router until a prefill instance is about to run out of "
        "work. Order: priority of the tier, fair share of each tenant, deadline. "
        "Direct: it goes to a prefill instance at once and waits in its engine (default Queue).",
    )
    # 0.5 s covers what passes between the end of a prompt and the start of the next one that the router sends
    # only then: the network and the engine's tokeniser (some 10 ms), the waiting room's check every 0.1 s,
    # and the error of the prediction (20 % of a prompt of 2 s). An engine step takes as long: 8,192 prompt
    # tokens in 0.3 s to 0.5 s on common accelerators, and an engine fills a step from what it has.
    prefill_ahead: Duration = Field(
        default=0.5,
        gt=0,
        description="In mode Queue: an instance gets no new prompt while the prefill work that it has takes "
        "at least this long. It must cover the sending of the next prompt, and errors of predictions "
        "(default 500ms).",
    )
    deflect: StrictBool = Field(
        default=True,
        description="Whether a decode instance computes a prompt itself if no prefill instance would compute "
        "it well in time and its decodes have time to spare before their TPOT objective (default true).",
    )
    prefix_aware: StrictBool = Field(
        default=False,
        description="Whether dispatch counts only the part of a prompt that an instance must compute. The "
        "beginning may be in its prefix cache, from an earlier prompt that began alike (default false).",
    )


class RouterTlsSpec(ApiModel):
    """TLS on a port of the router."""

    secret_name: str = Field(
        min_length=1,
        max_length=253,
        description="Secret of type kubernetes.io/tls with the certificate; a new certificate is used soon "
        "after the Secret has changed.",
    )


NO_CALLER_MESSAGE = "has neither apiKeys nor trustedProxies: write one of them, or remove auth"


class ApiKeysSpec(ApiModel):
    """API keys of clients."""

    secret_name: str = Field(
        min_length=1,
        max_length=253,
        description="Secret with one entry for each tenant. Each line of an entry is one key: its SHA-256 in "
        "hexadecimal digits, a space, and its name. A change is used within 10 s of its arrival in the pod.",
    )


class AuthSpec(ApiModel):
    """Who may send requests, and whose headers are trusted."""

    model_config = ConfigDict(
        json_schema_extra=cel_rule(
            "has(self.apiKeys) || (has(self.trustedProxies) && size(self.trustedProxies) > 0)",
            NO_CALLER_MESSAGE,
        )
    )

    trusted_proxies: tuple[
        Annotated[str, Field(pattern=r"^[0-9a-fA-F:.]{2,45}/[0-9]{1,3}$", max_length=49)], ...
    ] = Field(
        default=(),
        max_length=64,
        description="Networks (such as 10.0.0.0/8) of proxies whose headers x-customer-tier and x-tenant-id "
        "are used. From others these headers are ignored.",
    )
    api_keys: ApiKeysSpec | None = Field(
        default=None,
        description="API keys: a request without a valid one gets 401, unless a trusted proxy names its "
        "tenant or tier (default: no key is needed).",
    )

    @model_validator(mode="after")
    def _check_caller(self) -> Self:
        if self.api_keys is None and not self.trusted_proxies:
            raise ValueError(NO_CALLER_MESSAGE)
        return self


class RouterSpec(ApiModel):
    """How requests are routed, and the router's pods."""

    dispatch: DispatchSpec = Field(
        default_factory=DispatchSpec, description="Where requests wait for prefill."
    )
    admission: AdmissionMode = Field(
        default=AdmissionMode.OFF,
        description="What is done about a request that would miss its objectives, as predicted at its "
        "arrival. Enforce: requests of sheddable tiers (QoSTier) get status 429 with Retry-After. "
        "Advise: only metrics count what Enforce would do. 'Off' (in quotes: YAML reads a bare Off as "
        "false): every request is served, however late (default Off).",
    )
    access_log: StrictFloat = Field(
        default=0.0,
        ge=0.0,
        le=1.0,
        description="Share of requests that the router logs, in numbers and without text (default 0).",
    )
    named_tenants: StrictInt = Field(
        default=6,
        ge=0,
        le=50,
        description="Tenants that metrics name: those with most requests (default 6).",
    )
    timeouts: TimeoutsSpec = Field(
        default_factory=TimeoutsSpec, description="Longest waits of the router for an engine."
    )
    tls: RouterTlsSpec | None = Field(
        default=None,
        description="TLS on the port for clients; the Service then has port 443 (default: plain HTTP).",
    )
    state_tls: RouterTlsSpec | None = Field(
        default=None,
        description="TLS on the state port, which the operator and the autoscaler read with a token. The "
        "certificate is for NAME.NAMESPACE.svc, and its authority is the one in the chart's "
        "router.stateCASecret (default: plain HTTP).",
    )
    auth: AuthSpec | None = Field(
        default=None,
        description="Who may send requests (default: anybody; the headers x-customer-tier and x-tenant-id of "
        "any client are used).",
    )
    template: PodTemplatePatch | None = Field(
        default=None, description="Strategic merge patch of the router's pods (default: none)."
    )
