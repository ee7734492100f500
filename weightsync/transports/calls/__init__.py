"""Links to a worker that is reached by calls: the client at the sender, the server at the worker."""
