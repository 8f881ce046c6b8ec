"""From a conversation to what the engine is asked, and from its tokens to what a client reads; `Service` does both for
the model that is served, and counts."""
