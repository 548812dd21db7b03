"""Which replica answers a request: plain Python, without any server or cluster around it."""
