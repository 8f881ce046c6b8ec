"""Post-training: supervised fine-tuning, preferences, distillation; adapters or all weights."""
