"""The command line: play, up, plan, status, flip, drain, explain, doctor."""
