"""Report on a run: metrics, the live line, where its time went, and its page."""
