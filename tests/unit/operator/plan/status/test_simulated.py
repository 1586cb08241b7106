"""The condition Simulated follows the engines of the instances, and without instances the spec."""

import pytest

from fulcrum_core.api import PDInstance
from fulcrum_core.api.pdpool import EngineSpec
from fulcrum_operator.plan.status.simulated import simulated_condition
from tests.unit.operator.builders import instance, service


def made_up(instances: str) -> tuple[str, str, str]:
    message = f"{instances} run simulated engines: the text of their responses is made up"
    return "True", "SimulatedEngines", message


REAL = ("False", "RealEngines", "no instance runs a simulated engine")


@pytest.mark.parametrize(
    ("types", "expected"),
    [
        (("Simulated", "Simulated"), made_up("2 of 2 instances")),
        (("Simulated", "vLLM"), made_up("1 of 2 instances")),
        (("vLLM", "vLLM"), REAL),
        ((), made_up("0 of 0 instances")),
    ],
    ids=["all", "during a roll-out to real engines", "none", "no instance of a simulated service yet"],
)
def test_a_service_says_which_engines_are_simulated(
    types: tuple[str, ...], expected: tuple[str, str, str]
) -> None:
    found = simulated_condition(service(), tuple(_instance(kind) for kind in types))
    assert (found.status, found.reason, found.message) == expected


def _instance(kind: str) -> PDInstance:
    made = instance("chat-0")
    engine = EngineSpec.model_validate({"type": kind})
    return made.replace(spec=made.spec.model_copy(update={"engine": engine}))
