"""Constants of a module with their docstrings, which Python itself does not keep.

The pages of conditions and Events are made from them.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType


@dataclass(frozen=True, slots=True)
class Constant:
    """A constant of a module whose value is a text, and its docstring."""

    value: str
    meaning: str


def list_constants(module: ModuleType) -> Iterator[Constant]:
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
