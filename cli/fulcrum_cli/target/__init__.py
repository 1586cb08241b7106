"""Selects the local run or cluster that a command acts on, connects to it and reads from it."""
