"""Rewards: what a completion is worth. Functions of the user's and kinds of ours, called in processes of their own."""
