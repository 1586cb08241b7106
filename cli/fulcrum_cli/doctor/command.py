"""`fulcrum doctor`: gathers, examines, tells."""

import asyncio
from collections.abc import Sequence

from fulcrum_cli.arguments import one_of
from fulcrum_cli.connection import connected
from fulcrum_cli.doctor.examine import examine
from fulcrum_cli.doctor.findings import Finding, Standing, worst
from fulcrum_cli.doctor.gather import gather
from fulcrum_cli.output import Output, render
from fulcrum_cli.target import Asked, LocalTarget, choose_target

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
    names = sorted({run.service for run in target.runs}) if isinstance(target, LocalTarget) else [None]
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
    counts = [sum(finding.standing is each for finding in findings) for each in Standing]
    return [*lines, "", f"{counts[0]} ok, {counts[1]} warnings, {counts[2]} problems"]
