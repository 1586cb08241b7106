"""The page of the commands: arguments and options of `fulcrum`, as `--help` shows them.

`__main__` writes it.
"""

from collections.abc import Iterator
from typing import Any

import typer

from fulcrum_cli.__main__ import app
from tools.reference.markdown import code, table

_INTRODUCTION = """# Commands

`fulcrum COMMAND --help` shows the same texts. How a command finds its target, what it needs and its exit
codes: [the commands](../cli.md).

"""


def render_page() -> str:
    """Return the page: a section for each command, with a table of its arguments and options."""
    group: Any = typer.main.get_command(app)
    sections = (_render_command(name, command) for name, command in group.commands.items())
    return _INTRODUCTION + "\n".join(sections)


def _render_command(name: str, command: Any) -> str:
    arguments = "".join(f" {_name_argument(p)}" for p in command.params if p.param_type_name == "argument")
    head = f"## fulcrum {name}\n\n{command.help}\n\n    fulcrum {name} [OPTIONS]{arguments}\n\n"
    return head + table(("option or argument", "default", "meaning"), _list_rows(command.params))


def _name_argument(argument: Any) -> str:
    name = str(argument.name).upper()
    return name if argument.required else f"[{name}]"


def _list_rows(parameters: Any) -> Iterator[tuple[str, str, str]]:
    for parameter in parameters:
        if parameter.param_type_name == "argument":
            yield code(_name_argument(parameter)), "", parameter.help or ""
        else:
            spelling = ", ".join(map(code, [*parameter.opts, *parameter.secondary_opts]))
            yield spelling, _format_default(parameter), parameter.help or ""


def _format_default(option: Any) -> str:
    if option.required:
        return "required"
    return "" if option.default in (None, "", False) else code(str(option.default))
