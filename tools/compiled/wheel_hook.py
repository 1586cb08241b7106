"""Adds the compiled modules to the wheel if FULCRUM_COMPILED=1; without it the wheel is pure Python.

hatch calls it for each wheel (`pyproject.toml`), and `build` compiles. The sources are in the wheel either
way, and run where the compiled files do not fit the interpreter.
"""

import os
import sys
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class CompiledModules(BuildHookInterface[Any]):
    """A build hook of hatchling."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, and name the files for the wheel. An editable install is never compiled."""
        if os.environ.get("FULCRUM_COMPILED") != "1" or version == "editable":
            return
        sys.path.insert(0, self.root)
        from tools.compiled.build import compile_packages, list_libraries

        folder = compile_packages()
        build_data["force_include"].update(
            {str(library): str(library.relative_to(folder)) for library in list_libraries(folder)}
        )
        build_data["pure_python"], build_data["infer_tag"] = False, True
