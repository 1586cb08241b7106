"""Flips and cordons requested by a person: one write of the PDAssignment, then polling for its effect.

The commands `flip` and `drain` use both; `play` only writes.
"""
