"""The launch of vLLM for every shape of model, hardware and connector, as golden files."""

import json
from collections.abc import Callable, Iterator

import pytest

from fulcrum_operator.engines.launch import EngineLaunch, EnginePlan
from tests.unit.operator.engine_cases import CASES, Case, plan_case


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_launch_of_each_case_matches_its_golden_file(golden: Callable[[str, str], None], case: Case) -> None:
    golden(f"engines/{case.name}.txt", "\n".join(_text(case, plan_case(case))) + "\n")


def _text(case: Case, plan: EnginePlan) -> Iterator[str]:
    yield f"{case.model}: {plan.fit.status} {plan.fit.reason}: {plan.fit.message}"
    yield ""
    yield from (f"{choice.name}: {choice.value} ({choice.reason})" for choice in plan.choices)
    yield from (f"refused: {refusal}" for refusal in plan.unsupported)
    if plan.launch is not None:
        yield from _format_launch(plan.launch)


def _format_launch(launch: EngineLaunch) -> Iterator[str]:
    yield from ("", "command:", *_format_command(launch.command))
    yield from ("", "environment:")
    for variable in launch.env:
        source = variable.pod_field or (variable.secret and f"secret {variable.secret}")
        yield f"  {variable.name}={variable.value}{source and f'<{source}>'}"
    yield from ("", "ports: " + ", ".join(f"{port.name} {port.number}" for port in launch.ports), "volumes:")
    for volume in launch.volumes:
        size = "" if volume.size_bytes is None else f" {volume.size_bytes / 2**30:g}Gi"
        access = " read-only" if volume.read_only else ""
        yield f"  {volume.name} at {volume.mount}: {volume.kind} {volume.source}{size}{access}".replace(
            ":  ", ": "
        )
    yield f"starts in {launch.startup_s:g} s, ends within {launch.shutdown_s:g} s"
    yield f"flips by {launch.flip_strategy}"
    yield f"identity: {json.dumps(launch.identity.dump())}"


def _format_command(command: tuple[str, ...]) -> Iterator[str]:
    """One flag with its value on each line; JSON on several lines."""
    line = ""
    for part in command:
        if part.startswith("--") and line:
            yield f"  {line}"
            line = ""
        line += f"{' ' if line else ''}{_expand_json(part)}"
    yield f"  {line}"


def _expand_json(part: str) -> str:
    if not part.startswith("{"):
        return part
    return json.dumps(json.loads(part), indent=2).replace("\n", "\n    ")
