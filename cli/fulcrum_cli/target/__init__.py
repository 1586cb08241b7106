"""Selects the local run or cluster that a command acts on, connects to it and reads from it.

Every command with a target uses it. Changes of the assignment are in `assignment`.
"""
