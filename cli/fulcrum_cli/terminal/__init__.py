"""Output formats, signals and logs: what commands need of the terminal and of their process."""
