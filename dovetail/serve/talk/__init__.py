"""From a conversation to a prompt for the engine, and from the engine's tokens to an answer."""
