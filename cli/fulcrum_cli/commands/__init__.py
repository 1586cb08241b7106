"""One module per command; `play` and `doctor` have packages of their own.

`__main__` imports a command's module when it runs, and calls `run`.
"""
