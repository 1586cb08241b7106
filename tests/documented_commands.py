"""The commands in the documentation: the blocks of a page that are marked as shell.

A block is executed unless an HTML comment stands directly before it; the comment says why not.
`tests/kubernetes/nodes/test_documentation.py` executes the commands, and
`tests/unit/repository/test_documentation.py` checks that `EXECUTED_PAGES` is complete.
"""

import re
from dataclasses import dataclass
from pathlib import Path

EXECUTED_PAGES = (
    "tutorial.md",
    "how-to/install.md",
    "how-to/gated-models.md",
    "how-to/monitoring.md",
    "how-to/restricted-clusters.md",
    "how-to/scale-with-hpa.md",
    "how-to/upgrade.md",
)
"""Pages whose command blocks tests execute, under `docs/`."""

_BLOCK = re.compile(r"(?:<!-- (?P<note>.+?) -->\n)?```sh\n(?P<body>.*?)```", re.DOTALL)


@dataclass(frozen=True, slots=True)
class CommandBlock:
    """A block of commands; `note`: why it is not executed as it stands; None if it is executed."""

    commands: tuple[str, ...]
    note: str | None


def list_command_blocks(page: Path) -> list[CommandBlock]:
    """List the command blocks of a page, in order. Lines that end with a backslash are joined."""
    found = _BLOCK.finditer(page.read_text(encoding="utf-8"))
    return [CommandBlock(_split(match["body"]), match["note"]) for match in found]


def find_manifest(page: Path) -> str:
    """Return the first YAML block of a page that is a PDService.

    Raises:
        LookupError: if the page has none.
    """
    for block in re.findall(r"```yaml\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL):
        if "kind: PDService" in block:
            return str(block)
    raise LookupError(f"{page}: no PDService")


def _split(body: str) -> tuple[str, ...]:
    return tuple(line for line in body.replace("\\\n", " ").splitlines() if line)
