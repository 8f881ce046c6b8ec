"""The inference engine: requests, scheduling and device steps; LLM is its front door."""
