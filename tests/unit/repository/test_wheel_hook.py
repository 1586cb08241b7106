"""A wheel is pure Python by default; compiled modules are added only if they are asked for."""

from typing import Any

import pytest

from tests.paths import ROOT
from tools.compiled.wheel_hook import CompiledModules


@pytest.mark.parametrize(
    ("asked", "version"),
    [
        pytest.param("", "standard", id="a wheel without the variable"),
        pytest.param("0", "standard", id="a wheel that declines"),
        pytest.param("1", "editable", id="an editable install"),
    ],
)
def test_nothing_is_compiled_for(asked: str, version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FULCRUM_COMPILED", asked)
    build_data: dict[str, Any] = {"force_include": {}}
    hook: Any = CompiledModules
    hook(str(ROOT), {}, None, None, "", "wheel").initialize(version, build_data)
    assert build_data == {"force_include": {}}
