"""Flips and cordons requested by a person: one write of the PDAssignment, then polling for its effect."""
