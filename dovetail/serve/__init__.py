"""A model behind HTTP. The rooms, from the client to the engine; each imports only those after it:

http    the server: its socket, what every request passes, long bodies
api     one route each: a request's fields and checks (`*_request.py`), and how it is answered
talk    from a conversation to a prompt, and from the engine's tokens to an answer
tools   the formats in which models write tool calls and reasoning
remote  the engine's process, and the client that talks to it

`config` and `errors` are for all of them.
"""
