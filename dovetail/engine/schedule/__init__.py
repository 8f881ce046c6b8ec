"""Scheduling: pages, plans of steps, and step times."""
