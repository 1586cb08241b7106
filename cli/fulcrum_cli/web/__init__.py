"""The live page: reads one service, and shows it in the browser on this machine.

`fulcrum web` and `play --web` serve it. The page's own source is in `web/`, its bundle in this package.
"""
