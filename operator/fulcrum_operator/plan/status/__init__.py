"""What the status of a PDService says: one module per condition. Pure.

`plan/service` puts it into its plan. A condition reports; roles and engines do not depend on it.
"""
