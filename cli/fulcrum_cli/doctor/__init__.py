"""`fulcrum doctor`: gathers facts about a target, and derives findings from them by pure checks."""
