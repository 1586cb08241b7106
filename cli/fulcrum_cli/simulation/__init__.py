"""Options and output of `fulcrum simulate`. The simulation itself is in the simulator room.

The command is `commands.simulate`.
"""
