"""The condition SLOMet: as many requests meet their latency objectives as the service asks for.

`service` of this folder calls it; `plan/slo_window` counts and judges.
"""

from fulcrum_core.api import Condition, PDService, conditions
from fulcrum_operator.plan.slo_window import SloReport, no_request_ended
from fulcrum_operator.plan.status.condition import make_condition


def slo_met_condition(service: PDService, report: SloReport | None) -> Condition:
    """The condition SLOMet: from the report if there is one, else the previous condition, else NoTraffic."""
    if report is not None:
        return make_condition(service, conditions.SLO_MET, report.status, report.reason, report.message)
    for before in service.status.conditions:
        if before.type == conditions.SLO_MET:
            return make_condition(service, conditions.SLO_MET, before.status, before.reason, before.message)
    return make_condition(
        service, conditions.SLO_MET, "Unknown", conditions.NO_TRAFFIC, no_request_ended(service.spec.slo)
    )
