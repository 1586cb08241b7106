"""Engine adapters: from the spec of an instance to command line, identity and flip strategy. Pure.

The manifests, the local run and `fulcrum plan` call them; none starts an engine.
"""
