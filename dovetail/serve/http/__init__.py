"""The server: the application with its routes, the gate that every request passes, long bodies, and the socket."""
