"""The page of the conditions: each type with its reasons, from the docstrings of their constants."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from fulcrum_core.api import conditions
from fulcrum_core.models import fit
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


@dataclass(frozen=True, slots=True)
class Constant:
    """A constant of a module whose value is a text, and its docstring."""

    value: str
    meaning: str


def list_reasons() -> dict[str, list[Constant]]:
    """List the reasons of each type of condition."""
    reasons: dict[str, list[Constant]] = {}
    current: list[Constant] = []
    for constant in _list_constants(conditions):
        if constant.value in TYPES:
            current = reasons[constant.value] = []
        else:
            current.append(constant)
    not_applicable = next(r for r in reasons[conditions.KV_TRANSFER_VERIFIED] if r.value == "NotApplicable")
    reasons[conditions.MODEL_FITS] += [*_list_constants(fit), not_applicable]
    return reasons


def render_page() -> str:
    """Return the page: a section for each type, with a table of its reasons."""
    meanings = {constant.value: constant.meaning for constant in _list_constants(conditions)}
    reasons = list_reasons()
    return _INTRODUCTION + "\n".join(_render_type(name, meanings[name], reasons[name]) for name in TYPES)


def _render_type(name: str, meaning: str, reasons: list[Constant]) -> str:
    link = f"[What to do](../runbooks/{name}.md)"
    rows = ((code(reason.value), reason.meaning) for reason in reasons)
    return f"## {name}\n\n{meaning} {link}.\n\n{table(('reason', 'meaning'), rows)}"


def _list_constants(module: ModuleType) -> Iterator[Constant]:
    """List the public constants of a module that hold a text."""
    body = ast.parse(Path(module.__file__ or "").read_text(encoding="utf-8")).body
    for statement, after in zip(body, [*body[1:], None], strict=True):
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Constant(value=str(value))):
                if not name.startswith("_"):
                    yield Constant(value, _read_docstring(after))


def _read_docstring(statement: ast.stmt | None) -> str:
    match statement:
        case ast.Expr(value=ast.Constant(value=str(text))):
            return text.partition("\n\n")[0]
    return ""
