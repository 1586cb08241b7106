"""Flips and cordons that a person asks for: written to the PDAssignment, then waited for."""
