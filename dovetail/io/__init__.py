"""Read and write models, tokenizers, chat templates, tool calls and checkpoints."""
