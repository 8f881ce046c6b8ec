"""Turn a conversation into a prompt for the engine, and the engine's tokens into an answer."""
