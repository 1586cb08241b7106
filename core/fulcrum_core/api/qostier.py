"""QoSTier: priority and latency objectives of a class of requests."""

from typing import ClassVar, Literal

from pydantic import Field, StrictInt

from fulcrum_core.api.meta import ApiModel, Duration, PrinterColumn, Resource
from fulcrum_core.values import Slo


class SloSpec(ApiModel):
    """Latency objectives. A request meets them when TTFT and TPOT are both within."""

    ttft: Duration = Field(
        default=1.0,
        gt=0,
        description="Time to first token, from a request's arrival at the router to the first byte of its "
        "response (default 1s).",
    )
    tpot: Duration = Field(
        default=0.05,
        gt=0,
        description="Time per output token after the first, averaged over a request (default 50ms).",
    )

    def to_slo(self) -> Slo:
        """Convert to the value that policies use."""
        return Slo(ttft_s=self.ttft, tpot_s=self.tpot)


class QoSTierSpec(ApiModel):
    """Priority and objectives of a tier."""

    priority: StrictInt = Field(
        default=0,
        ge=-1000,
        le=1000,
        description="Higher is more important: engines serve waiting requests in this order (default 0).",
    )
    slo: SloSpec | None = Field(default=None, description="Objectives of the tier (default: the service's).")


class QoSTier(Resource):
    """A class of requests, named by services in spec.qosTiers and by any client in x-customer-tier."""

    plural: ClassVar[str] = "qostiers"
    short_name: ClassVar[str] = "qos"
    printer_columns: ClassVar[tuple[PrinterColumn, ...]] = (
        PrinterColumn(name="Priority", type="integer", json_path=".spec.priority"),
        PrinterColumn(name="TTFT", type="string", json_path=".spec.slo.ttft"),
        PrinterColumn(name="TPOT", type="string", json_path=".spec.slo.tpot"),
        PrinterColumn(name="Age", type="date", json_path=".metadata.creationTimestamp"),
    )

    kind: Literal["QoSTier"] = "QoSTier"
    spec: QoSTierSpec = Field(default_factory=QoSTierSpec, description="Priority and objectives of the tier.")
