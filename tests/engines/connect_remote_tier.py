"""Program for the engine environment: connects LMCache's server to a remote tier, as JSON on standard input.

`test_remote_tier` runs it. It exits when standard input ends.
"""

import json
import os
import sys

from lmcache.v1.distributed.l2_adapters import create_l2_adapter
from lmcache.v1.distributed.l2_adapters.resp_l2_adapter import RESPL2AdapterConfig


def main() -> None:
    """Connect, say so, and exit without waiting for the threads of the connections."""
    create_l2_adapter(RESPL2AdapterConfig.from_dict(json.loads(sys.stdin.readline())))
    print("connected", flush=True)
    sys.stdin.readline()
    os._exit(0)


if __name__ == "__main__":
    main()
