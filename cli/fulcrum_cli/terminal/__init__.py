"""Arguments, output, signals and logs of one command."""
