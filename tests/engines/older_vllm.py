"""A program, as text, that runs vLLM and reports an older version of vLLM.

`conftest.py` starts an engine with it, so that `test_incompatible_engines` has two engines with different
identities.
"""

OLDER_VLLM_VERSION = "0.31.0"
OLDER_VLLM_PROGRAM = f"""
import sys
import vllm
vllm.__version__ = "{OLDER_VLLM_VERSION}"  # processes that it starts run this, too
if __name__ == "__main__":
    from vllm.entrypoints.cli.main import main
    sys.exit(main())
"""
