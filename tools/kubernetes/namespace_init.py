"""First process of a set of namespaces: reaps orphans and, given a socket, relays it to the API server.

The socket was opened before the namespaces were made, so it keeps the network outside; what is dialled here
is inside. Kept apart from cluster.py so that it imports little and starts at once.

`machine` starts it; `cluster` reaches an API server inside through the socket.
"""

import asyncio
import signal
import socket
import sys

Reader = asyncio.StreamReader
Writer = asyncio.StreamWriter


async def pump(reader: Reader, writer: Writer) -> None:
    try:
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    except ConnectionError:
        pass
    finally:
        writer.close()


async def relay(reader: Reader, writer: Writer) -> None:
    try:
        inner_reader, inner_writer = await asyncio.open_connection("127.0.0.1", 6443)
    except OSError:
        writer.close()  # the API server does not listen yet; the client retries
        return
    await asyncio.gather(pump(reader, inner_writer), pump(inner_reader, writer))


async def run_init(listener: int | None) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    if listener is not None:
        await asyncio.start_server(relay, sock=socket.socket(fileno=listener))
    print("ready", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(run_init(int(sys.argv[1]) if len(sys.argv) > 1 else None))
