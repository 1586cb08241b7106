"""Whether this process runs the modules of the data path compiled to machine code, or as Python.

`__main__` logs it at the start.
"""

from fulcrum_router.data_path import exchange


def is_compiled() -> bool:
    """Whether the data path is compiled; the same sources run where the compiled files are missing."""
    return not exchange.__file__.endswith(".py")
