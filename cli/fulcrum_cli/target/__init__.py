"""Which local run or cluster a command talks to, and the connection to it."""
