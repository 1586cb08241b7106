"""The instances of the service: endpoint, role, health, engine metrics, KV transfers; and flip requests.

State that `observe` keeps current, and that the data path reads and changes. Choices are made in `policy`.
"""
