"""The page of the Events: each reason, from the docstrings of their constants. `__main__` writes it."""

from fulcrum_core.api import event_reasons
from tools.reference.constants import list_constants
from tools.reference.markdown import code, table

_INTRODUCTION = """# Events

The operator writes Events about a PDService; `kubectl describe pds NAME` and `kubectl get events` show them.
Programs match on the reason. A repeated Event increases the count of the first one, and each service has a
budget of Events. A cause of the condition [Degraded](conditions.md#degraded) is also an Event, with the
reason of the cause.

"""


def render_page() -> str:
    """Return the page: one table of all reasons."""
    rows = ((code(reason.value), reason.meaning) for reason in list_constants(event_reasons))
    return _INTRODUCTION + table(("reason", "meaning"), rows)
