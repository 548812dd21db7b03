"""Request routing: chooses a replica for each request. Plain Python, without server or cluster."""
