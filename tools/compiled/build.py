"""Compiles modules to machine code, with mypyc and the C compiler of this machine.

    python -m tools.compiled.build              prints a folder with fulcrum_core and fulcrum_router, compiled
    python -m tools.compiled.build simulator    the same with fulcrum_simulator, for simulations only

With that folder in `PYTHONPATH` a program or a test uses the compiled modules; a checkout never holds any.
`wheel_hook.py` adds the router's to the wheel of the image, and `tools/image` to the image for tests. The
simulator's are for measurements (`bench/compiled.py`).
The folder is in `.cache`, under a hash of the sources, these settings, and the versions of Python and mypy,
so that unchanged sources are compiled once; delete it after a change of the C compiler.
"""

import hashlib
import importlib.metadata
import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "tools" / "compiled"
SETTINGS = ("build.py", "mypy.ini")
"""Files of this folder that decide how modules are compiled."""
LIBRARY = "fulcrum_compiled"
"""Name of the shared library with all modules; next to it lies one small extension for each."""
_COMPILE = """
import sys
from mypyc.build import mypycify
from setuptools import Distribution

build, *modules = sys.argv[1:]
arguments = ["--config-file", "tools/compiled/mypy.ini", *modules]
extensions = mypycify(arguments, group_name={library!r}, opt_level="2", debug_level="0", target_dir=build)
command = Distribution({{"name": "fulcrum", "ext_modules": extensions}}).get_command_obj("build_ext")
command.build_lib, command.build_temp = build + "/lib", build + "/temp"
command.ensure_finalized()
command.run()
"""


@dataclass(frozen=True)
class Program:
    """What is compiled together: packages of the checkout, and the paths of their modules to compile."""

    packages: tuple[Path, ...]
    modules: tuple[str, ...]


def read_modules(name: str) -> list[str]:
    """Return the paths of modules in a list of this folder, relative to the checkout."""
    lines = (FOLDER / name).read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def describe_router() -> Program:
    """Return what the image runs compiled."""
    return Program(
        (Path("core/fulcrum_core"), Path("router/fulcrum_router")), tuple(read_modules("modules.txt"))
    )


def describe_simulator() -> Program:
    """Return what a simulation runs compiled: no module that serves sockets."""
    router = describe_router()
    shared = [m for m in router.modules if m.startswith(("core/", "router/fulcrum_router/policy/"))]
    return Program(
        (*router.packages, Path("simulator/fulcrum_simulator")), (*shared, *read_modules("simulator.txt"))
    )


def can_compile() -> bool:
    """Whether mypyc and a C compiler are installed."""
    compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")
    return importlib.util.find_spec("mypyc") is not None and shutil.which(compiler[0]) is not None


def compile_packages(program: Program | None = None) -> Path:
    """Return the folder with the program's packages, sources and compiled modules; by default the router's.

    They are compiled if they changed.

    Raises:
        SystemExit: if they cannot be compiled.
    """
    program = program or describe_router()
    folder = ROOT / ".cache" / "compiled" / _hash_inputs(program)
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
            _compile(program.modules, Path(scratch))
            library = Path(scratch, "lib")
            for package in program.packages:
                shutil.copytree(
                    ROOT / package,
                    library / package.name,
                    ignore=shutil.ignore_patterns("__pycache__"),
                    dirs_exist_ok=True,
                )
            _publish(library, folder)
    return folder


def _publish(library: Path, folder: Path) -> None:
    """Move what was compiled to its place, unless another process has compiled the same sources meanwhile."""
    try:
        library.replace(folder)
    except OSError:
        if not folder.is_dir():
            raise


def list_libraries(folder: Path) -> list[Path]:
    """Return what was compiled: one small extension for each module, and the library with all of them."""
    return sorted(folder.rglob("*.so"))


def _compile(modules: tuple[str, ...], scratch: Path) -> None:
    code = _COMPILE.format(library=LIBRARY)
    arguments = [sys.executable, "-c", code, str(scratch), *modules]
    environment = {**os.environ, "CFLAGS": "-O2 -w"}
    result = subprocess.run(
        arguments, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
    )
    if result.returncode:
        raise SystemExit(f"error: the modules were not compiled:\n{result.stdout.decode()}")


def _hash_inputs(program: Program) -> str:
    """Hash the sources of all packages (types decide what is generated), the tools and their versions."""
    digest = hashlib.sha256(f"{sys.version} {importlib.metadata.version('mypy')}".encode())
    digest.update("\n".join(program.modules).encode())
    sources = [path for package in program.packages for path in sorted((ROOT / package).rglob("*.py"))]
    for path in (*sources, *(FOLDER / name for name in SETTINGS)):
        digest.update(str(path.relative_to(ROOT)).encode() + path.read_bytes())
    return digest.hexdigest()[:16]


if __name__ == "__main__":
    if sys.argv[1:] not in ([], ["simulator"]):
        raise SystemExit("error: expected no argument, or `simulator`")
    print(compile_packages(describe_simulator() if sys.argv[1:] else None))
