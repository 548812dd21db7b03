"""Files of requests, answered by the server's own routes inside this process."""
