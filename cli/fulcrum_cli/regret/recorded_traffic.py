"""Parses the requests that a router recorded, from its page `/requests` or a saved one, into a workload.

Tier and tenant of a request are not kept: the simulation gives all requests the objectives of the service.
The command `regret` fetches the page and simulates.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from fulcrum_cli.regret.alternatives import RanAs
from fulcrum_cli.simulation.options import INSTANCES_MAX
from fulcrum_core.api.pdservice import PDServiceSpec
from fulcrum_core.errors import InvalidInput
from fulcrum_core.formatting import format_count
from fulcrum_core.validation_rules import shorten_value
from fulcrum_core.values import AutoscalingMode, FlipPolicy, Slo
from fulcrum_simulator.fleet.load import DURATION_MAX_S
from fulcrum_simulator.fleet.options import PolicyName
from fulcrum_simulator.workload import TOKENS_MAX, WorkloadRequest

_MIN_REQUESTS = 20
PAGE_BYTES_MAX = 64 << 20
"""Longest page that is read: that of a full recorder has about 10 MB."""
_APART_MAX_S = 7_200.0
"""Longest time from the first arrival to the last: a router keeps an hour, and its clock may be set."""
_UNSCORED = frozenset({"invalid", "limited"})
"""Outcomes of requests that are left out of the replay: no engine worked for them, whatever the policy."""
_NOT_JUDGED = _UNSCORED | {"cancelled"}
_MOST = {
    "prompt_tokens": TOKENS_MAX,
    "output_tokens": TOKENS_MAX,
    "ttft_s": DURATION_MAX_S,
    "duration_s": DURATION_MAX_S,
}
"""Highest values of a request, by field."""


def _check_printable(text: str) -> str:
    if not text.isprintable():
        raise ValueError("must be printable text on one line")
    return text


_Number = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_Objective = Annotated[float, Field(gt=0, le=DURATION_MAX_S, allow_inf_nan=False)]


class _Objectives(BaseModel):
    ttft_s: _Objective
    tpot_s: _Objective


class _Page(BaseModel):
    """The page of a router, as `fulcrum_router.control.requests_page` writes it."""

    model_config = ConfigDict(frozen=True, extra="ignore")  # a newer router may send more

    service: Annotated[str, Field(min_length=1, max_length=253), AfterValidator(_check_printable)]
    slo: _Objectives
    spec: PDServiceSpec | None = None
    """Added by `add_spec`; the router does not know it."""
    prefill_instances: Annotated[int, Field(ge=0)]
    decode_instances: Annotated[int, Field(ge=0)]
    outcomes: tuple[str, ...]
    fields: tuple[str, ...]
    requests: tuple[tuple[_Number | None, ...], ...]


@dataclass(frozen=True, slots=True)
class _Request:
    """One recorded request; see `fulcrum_router.policy.flight_recorder.RequestRecord`."""

    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    ttft_s: float | None
    duration_s: float
    outcome: str

    def meets(self, slo: Slo) -> bool:
        """Whether the request met its objectives, as the router counts it."""
        if self.outcome != "ok":
            return False
        tokens = max(1, self.output_tokens)
        if self.ttft_s is None:
            return self.duration_s <= slo.compute_response_limit_s(tokens)
        tpot_s = (self.duration_s - self.ttft_s) / (tokens - 1) if tokens > 1 else 0.0
        return self.ttft_s <= slo.ttft_s and tpot_s <= slo.tpot_s


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedTraffic:
    """The requests of a service that its router recorded, and the service as it was then."""

    service: str
    slo: Slo
    ran_as: RanAs
    requests: tuple[WorkloadRequest, ...]
    """In the order of their arrivals, from 0 on."""
    attainment: float | None
    """Share of the judged requests that met their objectives; None without any."""
    guessed_outputs: int
    """Requests that did not end as they should have: they get the median output of the others."""

    @property
    def duration_s(self) -> float:
        """Seconds from the first arrival to the last."""
        return self.requests[-1].arrival_s


def read_file(path: Path) -> Any:
    """Read a saved page.

    Raises:
        InvalidInput: if the file cannot be read, or is not JSON.
    """
    try:
        with path.open("rb") as file:
            raw = file.read(PAGE_BYTES_MAX + 1)
        if len(raw) > PAGE_BYTES_MAX:
            raise ValueError(f"it has more than {PAGE_BYTES_MAX:,} bytes")
        return json.loads(raw)
    except OSError as error:
        raise InvalidInput("--file", path, f"cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise InvalidInput("--file", path, f"cannot be read: {error}") from error


def add_spec(document: Any, spec: PDServiceSpec) -> Any:
    """Add the spec of the service to a page of its router, so that the page is all that a replay needs."""
    return {**document, "spec": spec.dump()} if isinstance(document, dict) else document


def parse_page(document: Any, source: str) -> RecordedTraffic:
    """Parse a page; `source` names it in errors.

    Raises:
        InvalidInput: if it is not a page of a router, or has too few requests to replay.
    """
    try:
        page = _Page.model_validate(document)
        recorded = sorted(_read_requests(page), key=lambda request: request.arrival_s)
    except ValidationError as error:
        first = error.errors()[0]
        place = shorten_value(".".join(map(str, first["loc"]))) or "the document"
        rule = " ".join(first["msg"].removeprefix("Value error, ").split())
        raise InvalidInput(source, place, f"is not as in the page /requests of a router: {rule}") from None
    except ValueError as error:
        raise InvalidInput(source, "requests", f"are not those of a router: {error}") from None
    load = [request for request in recorded if request.outcome not in _UNSCORED]
    if len(load) < _MIN_REQUESTS:
        recorded_count = f"{format_count(len(load), 'request')} recorded"
        raise InvalidInput(source, recorded_count, f"must have at least {_MIN_REQUESTS} for a replay")
    judged = [request for request in load if request.outcome not in _NOT_JUDGED]
    slo = Slo(page.slo.ttft_s, page.slo.tpot_s)
    return RecordedTraffic(
        service=page.service,
        slo=slo,
        ran_as=_find_ran_as(page, source),
        requests=_make_workload(load),
        attainment=sum(request.meets(slo) for request in judged) / len(judged) if judged else None,
        guessed_outputs=sum(not request.output_tokens for request in load),
    )


def _find_ran_as(page: _Page, source: str) -> RanAs:
    instances = page.prefill_instances + page.decode_instances
    if instances < 2:
        serving = format_count(instances, "serving instance")
        raise InvalidInput(source, serving, "must have at least 2 for a split")
    if instances > INSTANCES_MAX:
        raise InvalidInput(source, f"{instances} serving instances", f"must have at most {INSTANCES_MAX}")
    spec = page.spec or PDServiceSpec(model=page.service, instances=instances)
    autoscaling = spec.autoscaling
    policy = PolicyName.BALANCED if autoscaling.policy is FlipPolicy.BALANCED else PolicyName.ARROW
    flipped = autoscaling.mode is AutoscalingMode.AUTO and not autoscaling.flip.paused
    return RanAs(
        spec=_allow_flips(spec),
        policy=policy if flipped else PolicyName.STATIC,
        prefill=page.prefill_instances,
        instances=instances,
    )


def _allow_flips(spec: PDServiceSpec) -> PDServiceSpec:
    """Other policies are compared as they would flip; a service that does not flip ran as a fixed split."""
    flip = spec.autoscaling.flip.model_copy(update={"paused": False})
    autoscaling = spec.autoscaling.model_copy(update={"mode": AutoscalingMode.AUTO, "flip": flip})
    return spec.model_copy(update={"autoscaling": autoscaling})


def _read_requests(page: _Page) -> Sequence[_Request]:
    """Raises ValueError, with the rule, if a field is missing or a value is out of its range."""
    names = ("arrival_s", "prompt_tokens", "output_tokens", "ttft_s", "duration_s", "outcome")
    for name in names:
        if name not in page.fields:
            raise ValueError(f"the field {name} is missing")
    positions = [page.fields.index(name) for name in names]
    requests = []
    for row in page.requests:
        if len(row) != len(page.fields):
            raise ValueError(f"a request has {len(row)} values for {len(page.fields)} fields")
        values = [row[position] for position in positions]
        _check_values(page, dict(zip(names, values, strict=True)))
        arrival_s, prompt, output, ttft_s, duration_s, outcome = values
        if arrival_s is None or duration_s is None:
            raise ValueError("a request without a time")
        requests.append(
            _Request(
                arrival_s,
                int(prompt or 0),
                int(output or 0),
                ttft_s,
                duration_s,
                page.outcomes[int(outcome or 0)],
            )
        )
    arrivals = [request.arrival_s for request in requests]
    if arrivals and (apart_s := max(arrivals) - min(arrivals)) > _APART_MAX_S:
        raise ValueError(f"arrivals {apart_s:g} s apart are above {_APART_MAX_S:g}")
    return requests


def _check_values(page: _Page, values: dict[str, float | None]) -> None:
    for name, most in _MOST.items():
        if (value := values[name] or 0.0) > most:
            raise ValueError(f"{name} {value:g} is above {most:g}")
    if (outcome := values["outcome"] or 0.0) >= len(page.outcomes):
        raise ValueError(f"outcome {outcome:g} is not below {len(page.outcomes)}, the number of outcomes")


def _make_workload(recorded: Sequence[_Request]) -> tuple[WorkloadRequest, ...]:
    known = [request.output_tokens for request in recorded if request.output_tokens]
    typical = int(median(known)) if known else 1
    first_s = recorded[0].arrival_s
    return tuple(
        WorkloadRequest(
            request.arrival_s - first_s,
            max(1, request.prompt_tokens),
            request.output_tokens or typical,
        )
        for request in recorded
    )
