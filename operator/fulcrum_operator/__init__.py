"""The operator: makes what a PDService asks for, and drives every instance through its phases.

`plan/`, `manifests/` and `engines/` decide and are pure; `controller/` observes and applies. A local run uses
the same plan and reconcile.
"""
