"""`fulcrum doctor`: gathers facts about a target, and derives findings from them by pure checks.

The command is `commands.doctor`. Nothing is changed.
"""
