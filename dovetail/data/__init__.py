"""Data: sources, tokenising, packing and loading, for pretraining, fine-tuning and RL."""
