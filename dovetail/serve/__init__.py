"""The HTTP server of a model. Its rooms, from the client to the engine; each imports only those after it.

http    the server: its socket, the gate that every request passes, long bodies
api     the routes: each route's request and its answer
talk    from a conversation to a prompt, and from the engine's tokens to an answer
remote  the engine's process, and the client that talks to it

`config`, `errors` and `request_context` are for all of them.
"""
