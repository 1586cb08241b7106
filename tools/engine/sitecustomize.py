"""Fits engines to a small machine; `engine-env` puts this file where Python imports it at start-up.

* NIXL's progress thread sleeps, so that an idle instance does not keep a core at 100 %. NIXL's Python API
  hard-codes `pthrDelay = 0`: its UCX progress thread spins. Any delay above 0 us lets it sleep.
* Garbage is looked for seldom. Imports make millions of objects that stay, and a fifth of the time that they
  take went into looking through them.
"""

import gc
import importlib.abc
import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_MODULES = ("nixl_cu12._api", "nixl_cu13._api")
_DELAY_US = int(os.environ.get("NIXL_PROGRESS_DELAY_US", "200"))


def _patch(module: Any) -> None:
    original = module.nixlBind.nixlAgent

    def agent(name: str, config: Any) -> Any:
        config.pthrDelay = _DELAY_US
        return original(name, config)

    module.nixlBind.nixlAgent = agent


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname: str, *_: Sequence[str] | ModuleType | None) -> ModuleSpec | None:
        """The module as the other finders have it, patched once it is loaded."""
        if fullname not in _MODULES:
            return None
        sys.meta_path.remove(self)
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            sys.meta_path.insert(0, self)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                _patch(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


gc.set_threshold(100_000)
sys.meta_path.insert(0, _Finder())
