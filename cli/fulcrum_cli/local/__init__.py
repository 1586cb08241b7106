"""A local run: one PDService on this machine, with a store in memory and processes instead of pods.

`run.run_local` brings a run up for `fulcrum up --local` and `fulcrum play`. Nothing is imported here, because
each engine of a run starts through `exec_with_parent`, and `fulcrum status` needs `run_folder` only.
"""
