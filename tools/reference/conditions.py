"""The page of the conditions: each type with its reasons, from the docstrings of their constants.

`__main__` writes it, and a test compares the reasons with the runbooks.
"""

from fulcrum_core.api import conditions
from fulcrum_core.models import fit
from tools.reference.constants import Constant, list_constants
from tools.reference.markdown import code, table

TYPES = (
    conditions.READY,
    conditions.PROGRESSING,
    conditions.DEGRADED,
    conditions.TIERS_ACCEPTED,
    conditions.SIMULATED,
    conditions.SCALING_LIMITED,
    conditions.MODEL_FITS,
    conditions.KV_TRANSFER_VERIFIED,
    conditions.SLO_MET,
)
"""Types of conditions, each written in its module before its reasons."""

_INTRODUCTION = """# Conditions

`kubectl describe pds NAME` and `fulcrum status NAME` show the conditions of a service. Programs match on
type and reason; messages are for people. What to do about each reason: the page of the condition in the
runbooks.

"""


def list_reasons() -> dict[str, list[Constant]]:
    """List the reasons of each type of condition."""
    reasons: dict[str, list[Constant]] = {}
    current: list[Constant] = []
    for constant in list_constants(conditions):
        if constant.value in TYPES:
            current = reasons[constant.value] = []
        else:
            current.append(constant)
    not_applicable = next(r for r in reasons[conditions.KV_TRANSFER_VERIFIED] if r.value == "NotApplicable")
    reasons[conditions.MODEL_FITS] += [*list_constants(fit), not_applicable]
    return reasons


def render_page() -> str:
    """Return the page: a section for each type, with a table of its reasons."""
    meanings = {constant.value: constant.meaning for constant in list_constants(conditions)}
    reasons = list_reasons()
    return _INTRODUCTION + "\n".join(_render_type(name, meanings[name], reasons[name]) for name in TYPES)


def _render_type(name: str, meaning: str, reasons: list[Constant]) -> str:
    link = f"[What to do](../runbooks/{name}.md)"
    rows = ((code(reason.value), reason.meaning) for reason in reasons)
    return f"## {name}\n\n{meaning} {link}.\n\n{table(('reason', 'meaning'), rows)}"
