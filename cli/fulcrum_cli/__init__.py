"""The command line: play, up, status, flip, explain."""
