"""Images of requests: from where they may be read, and what a request refers to."""
