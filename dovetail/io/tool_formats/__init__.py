"""Tool calls and reasoning: the formats in which models write them, the parser that takes a model's text apart as it
comes, and the grammars that make a model call."""
