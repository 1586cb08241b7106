"""The revision of a launch spec stays what earlier operators computed: an upgrade replaces no instance."""

import pytest

from fulcrum_core.api.pdpool import EngineSpec, LaunchSpec


@pytest.mark.parametrize(
    ("engine", "revision"),
    [
        pytest.param({"type": "vLLM"}, "63c3460b94", id="vLLM, once not the default type"),
        pytest.param({}, "63c3460b94", id="no type"),
        pytest.param({"type": "Simulated"}, "4482dd45c7", id="Simulated, once the default type"),
    ],
)
def test_the_revision_of_a_launch_spec_does_not_change_with_the_operator(
    engine: dict[str, str], revision: str
) -> None:
    spec = LaunchSpec(model="Qwen/Qwen3-32B", engine=EngineSpec.model_validate(engine))
    assert spec.launch_revision == revision


def test_two_engine_types_never_have_the_same_revision() -> None:
    revisions = {
        LaunchSpec(model="m", engine=EngineSpec.model_validate({"type": name})).launch_revision
        for name in ("vLLM", "Simulated")
    }
    assert len(revisions) == 2
