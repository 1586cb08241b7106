"""Output formats, signals and logs: what commands need of the terminal and of their process.

The commands use it; the screen of `play` is in `play`.
"""
