"""`fulcrum regret`: the recorded requests of a service, replayed with other policies and instance counts.

The command is `commands.regret`; it only reads the service.
"""
