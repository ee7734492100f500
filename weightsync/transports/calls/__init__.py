"""Links to a worker that is reached by calls: the client in the sender, the server in the worker."""
