"""`fulcrum doctor`: gathers, examines, tells."""

import asyncio
from collections.abc import Sequence

from fulcrum_cli.doctor.examine import examine
from fulcrum_cli.doctor.findings import Finding, Standing, worst
from fulcrum_cli.doctor.gather import gather
from fulcrum_cli.target.connection import connected
from fulcrum_cli.target.target import Asked, LocalTarget, choose_target
from fulcrum_cli.terminal.arguments import one_of
from fulcrum_cli.terminal.output import Output, render
from fulcrum_core.spelling import format_count

_MARKS = {Standing.OK: "ok      ", Standing.WARNING: "warning ", Standing.PROBLEM: "PROBLEM "}


def run(asked: Asked, *, output: str | None) -> int:
    """Prints every check's answer; 1 if one of them is a problem."""
    form = None if output is None else one_of("--output", output, Output)
    words, findings = asyncio.run(_examined(asked))
    if form is None:
        print("\n".join(tell(findings)))
        print("\n".join(f"target {word}" for word in words))
    else:
        checks = [finding.dump() for finding in findings]
        print(render({"target": words, "verdict": worst(findings).value, "checks": checks}, form))
    return 1 if worst(findings) is Standing.PROBLEM else 0


async def _examined(asked: Asked) -> tuple[list[str], tuple[Finding, ...]]:
    """Of all services that run here, or of the namespace of a cluster."""
    target = choose_target(asked)
    names: Sequence[str | None] = target.services if isinstance(target, LocalTarget) else [None]
    findings: list[Finding] = []
    words: list[str] = []
    for name in names:
        async with connected(target, name, bare=True) as there:
            findings += examine(await gather(there))
            words.append(there.words)
    return words, tuple(findings)


def tell(findings: Sequence[Finding]) -> list[str]:
    """One line a finding, what to do below it; a count at the end."""
    lines = []
    for finding in findings:
        lines.append(f"{_MARKS[finding.standing]} {finding.title}: {finding.seen}")
        if finding.advice:
            lines.append(f"         → {finding.advice}")
        if finding.explains:
            lines.append(f"         follows from it: {', '.join(finding.explains)}")
    fine, warnings, problems = (sum(each.standing is kind for each in findings) for kind in Standing)
    told = f"{fine} ok, {format_count(warnings, 'warning')}, {format_count(problems, 'problem')}"
    return [*lines, "", told]
