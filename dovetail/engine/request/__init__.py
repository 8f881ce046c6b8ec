"""Requests: parameters, checks, sequences, text, stops and outputs."""
