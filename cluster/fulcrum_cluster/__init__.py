"""Where desired state lives: one store behind core's port, in memory and on a unix socket.

Shells reach a store through `MemoryStore` (same process) or `open_store("unix:PATH")` (another one), follow
it with `Mirror`, and share here what every process of a local run does at its start and end.
"""
