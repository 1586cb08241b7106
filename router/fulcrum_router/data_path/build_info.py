"""Whether this process runs the modules of the data path compiled to machine code, or as Python."""

from fulcrum_router.data_path import exchange


def is_compiled() -> bool:
    """Whether the data path is compiled; the same sources run where the compiled files are missing."""
    return not exchange.__file__.endswith(".py")
