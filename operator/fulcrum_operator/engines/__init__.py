"""Engine adapters: from the spec of an instance to command line, identity and flip strategy. Pure."""
