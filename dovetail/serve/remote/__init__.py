"""The engine in its own process.

On the HTTP side: `client`, over `supervisor` (restarts), `control_state` (state to restore) and `child` (one process).
On the engine's side: `process`. `wire` defines the messages between the two.
"""
