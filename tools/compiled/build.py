"""Compiles the modules of `modules.txt` to machine code, with mypyc and the C compiler of this machine.

    python -m tools.compiled.build      prints a folder with fulcrum_core and fulcrum_router, compiled

With that folder in `PYTHONPATH` a program or a test uses the compiled modules; a checkout never holds any.
`wheel_hook.py` adds them to the wheel of the image, and `tools/image` to the image for tests.
The folder is in `.cache`, under a hash of all that went into it, so that unchanged sources are compiled once.
"""

import hashlib
import importlib.metadata
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = (Path("core/fulcrum_core"), Path("router/fulcrum_router"))
INPUTS = ("build.py", "modules.txt", "mypy.ini")
"""Files of this folder that decide what is generated."""
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


def list_modules() -> list[str]:
    """Return the paths of the modules that are compiled, relative to the checkout."""
    lines = (ROOT / "tools" / "compiled" / "modules.txt").read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def compile_packages() -> Path:
    """Return the folder with both packages, sources and compiled modules; compile them if they changed."""
    folder = ROOT / ".cache" / "compiled" / _hash_inputs()
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
            _compile(Path(scratch))
            library = Path(scratch, "lib")
            for package in PACKAGES:
                shutil.copytree(
                    ROOT / package,
                    library / package.name,
                    ignore=shutil.ignore_patterns("__pycache__"),
                    dirs_exist_ok=True,
                )
            library.replace(folder)  # atomic: another process may compile the same sources
    return folder


def list_libraries(folder: Path) -> list[Path]:
    """Return what was compiled: one small extension for each module, and the library with all of them."""
    return sorted(folder.rglob("*.so"))


def _compile(scratch: Path) -> None:
    code = _COMPILE.format(library=LIBRARY)
    arguments = [sys.executable, "-c", code, str(scratch), *list_modules()]
    environment = {**os.environ, "CFLAGS": "-O2 -w"}
    result = subprocess.run(
        arguments, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
    )
    if result.returncode:
        raise SystemExit(f"error: the router was not compiled:\n{result.stdout.decode()}")


def _hash_inputs() -> str:
    """Hash the sources of both packages (types decide what is generated), the tools and their versions."""
    digest = hashlib.sha256(f"{sys.version} {importlib.metadata.version('mypy')}".encode())
    sources = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    for path in (*sources, *(ROOT / "tools" / "compiled" / name for name in INPUTS)):
        digest.update(str(path.relative_to(ROOT)).encode() + path.read_bytes())
    return digest.hexdigest()[:16]


if __name__ == "__main__":
    print(compile_packages())
