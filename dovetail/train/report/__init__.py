"""What a run says of itself: metrics, the live line, where its time went, its page."""
