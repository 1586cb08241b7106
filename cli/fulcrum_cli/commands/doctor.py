"""`fulcrum doctor`: gathers facts about the target, checks them and prints the findings.

Reading, checks and grouping are in the package `doctor`. It changes nothing; exit code 1 if there is a
problem.
"""

import asyncio
from collections.abc import Sequence

from fulcrum_cli.doctor.examine import examine
from fulcrum_cli.doctor.findings import Finding, Severity, worst_severity
from fulcrum_cli.doctor.gather import gather_facts
from fulcrum_cli.option_values import parse_choice
from fulcrum_cli.target.connection import connect
from fulcrum_cli.target.selection import LocalTarget, TargetOptions, choose_target
from fulcrum_cli.terminal.output import OutputFormat, render_document
from fulcrum_core.formatting import format_count

_MARKS = {Severity.OK: "ok      ", Severity.WARNING: "warning ", Severity.PROBLEM: "PROBLEM "}


def run(target_options: TargetOptions, *, output: str | None) -> int:
    """Print every finding; return 1 if one is a problem, else 0."""
    output_format = None if output is None else parse_choice("--output", output, OutputFormat)
    descriptions, findings = asyncio.run(_gather_and_examine(target_options))
    if output_format is None:
        print("\n".join(format_findings(findings)))
        print("\n".join(f"target {line}" for line in descriptions))
    else:
        checks = [finding.dump() for finding in findings]
        print(
            render_document(
                {"target": descriptions, "severity": worst_severity(findings).value, "checks": checks},
                output_format,
            )
        )
    return 1 if worst_severity(findings) is Severity.PROBLEM else 0


async def _gather_and_examine(target_options: TargetOptions) -> tuple[list[str], tuple[Finding, ...]]:
    """Examine all local runs, or one namespace of a cluster; return the targets and the findings."""
    target = choose_target(target_options)
    names: Sequence[str | None] = target.services if isinstance(target, LocalTarget) else [None]
    findings: list[Finding] = []
    descriptions: list[str] = []
    for name in names:
        async with connect(target, name, crds_optional=True) as connection:
            findings += examine(await gather_facts(connection))
            descriptions.append(connection.description)
    return descriptions, tuple(findings)


def format_findings(findings: Sequence[Finding]) -> list[str]:
    """Return one line for each finding with its advice and consequences below it, and a count at the end."""
    lines = []
    for finding in findings:
        lines.append(f"{_MARKS[finding.severity]} {finding.title}: {finding.observed}")
        if finding.advice:
            lines.append(f"         → {finding.advice}")
        if finding.consequences:
            lines.append(f"         explains also: {', '.join(finding.consequences)}")
    fine, warnings, problems = (sum(each.severity is kind for each in findings) for kind in Severity)
    counts = f"{fine} ok, {format_count(warnings, 'warning')}, {format_count(problems, 'problem')}"
    return [*lines, "", counts]
