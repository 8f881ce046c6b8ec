"""Formats of tool calls and reasoning, a streaming parser for them, and grammars that make a model call tools.

The server and RL agents share them.
"""
