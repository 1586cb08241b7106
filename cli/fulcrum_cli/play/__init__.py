"""`fulcrum play`: a service on this machine under load, with a live view of its roles and a report.

The command is `commands.play`; `local` starts the service, and `web` has the live page.
"""
