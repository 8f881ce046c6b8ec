"""A food diary that a vision-language model keeps: see README.md."""
