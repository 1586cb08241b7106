"""Reference pages of the documentation, generated from the code they describe.

`make generate` writes them. A wrong text is mended where the field, metric, reason or option is defined.
"""
