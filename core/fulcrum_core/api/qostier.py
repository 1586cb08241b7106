"""QoSTier: how much a class of requests matters and how fast it must be."""

from typing import ClassVar, Literal

from pydantic import Field, StrictInt

from fulcrum_core.api.meta import ApiModel, Duration, PrinterColumn, Resource
from fulcrum_core.values import Slo


class SloSpec(ApiModel):
    """Latency objectives. A request meets them when TTFT and TPOT are both within."""

    ttft: Duration = Field(
        default=1.0,
        gt=0,
        description="Time to first token, from the router's arrival to the first content byte (default 1s).",
    )
    tpot: Duration = Field(
        default=0.05,
        gt=0,
        description="Time per output token after the first, averaged over a request (default 50ms).",
    )

    def to_slo(self) -> Slo:
        """The value that policies use."""
        return Slo(ttft_s=self.ttft, tpot_s=self.tpot)


class QoSTierSpec(ApiModel):
    """What a tier asks for."""

    priority: StrictInt = Field(
        default=0,
        ge=-1000,
        le=1000,
        description="Higher is more important (default 0): the engine serves such waiting requests first.",
    )
    slo: SloSpec | None = Field(default=None, description="Objectives of this tier; unset: the service's.")


class QoSTier(Resource):
    """A class of requests, named by services in spec.qosTiers and by requests in x-customer-tier."""

    plural: ClassVar[str] = "qostiers"
    short_name: ClassVar[str] = "qos"
    printer_columns: ClassVar[tuple[PrinterColumn, ...]] = (
        PrinterColumn(name="Priority", type="integer", json_path=".spec.priority"),
        PrinterColumn(name="TTFT", type="string", json_path=".spec.slo.ttft"),
        PrinterColumn(name="TPOT", type="string", json_path=".spec.slo.tpot"),
        PrinterColumn(name="Age", type="date", json_path=".metadata.creationTimestamp"),
    )

    kind: Literal["QoSTier"] = "QoSTier"
    spec: QoSTierSpec = Field(default_factory=QoSTierSpec, description="What the tier asks for.")
