"""The published weights of each shipped architecture, which its name means: a hub id, or a catalogue name.

Of the models that exist as a base and as a chat model the second is named, for it comes with a chat template.
"""

from __future__ import annotations

PUBLISHED = {
    "gemma3-4b": "google/gemma-3-4b-it",
    "gemma3-12b": "google/gemma-3-12b-it",
    "gemma3-27b": "google/gemma-3-27b-it",
    "llama2-7b": "meta-llama/Llama-2-7b-chat-hf",
    "llama2-13b": "meta-llama/Llama-2-13b-chat-hf",
    "llama2-70b": "meta-llama/Llama-2-70b-chat-hf",
    "llama3-1b": "meta-llama/Llama-3.2-1B-Instruct",
    "llama3-8b": "meta-llama/Meta-Llama-3-8B-Instruct",
    "llama3-70b": "meta-llama/Meta-Llama-3-70B-Instruct",
    "llama3-405b": "meta-llama/Llama-3.1-405B-Instruct",
    "mistral-7b": "mistralai/Mistral-7B-Instruct-v0.3",
    "mixtral-8x7b": "mistralai/Mixtral-8x7B-Instruct-v0.1",
    "qwen3-0.6b": "Qwen/Qwen3-0.6B",
    "qwen3-8b": "Qwen/Qwen3-8B",
    "qwen3-32b": "Qwen/Qwen3-32B",
    "qwen3-30b-a3b": "Qwen/Qwen3-30B-A3B",
    "smollm2-135m": "smollm2-135m",  # in the catalogue (io.hub)
    "smollm2-360m": "HuggingFaceTB/SmolLM2-360M-Instruct",
}
# Shipped architectures without weights to serve, and why.
UNPUBLISHED = {
    "deepseek-v3": "deepseek-ai/DeepSeek-V3 is published in fp8, which is not loaded: serve a folder with a bf16 copy",
    "tiny": "nobody publishes weights of it: train it (dovetail pretrain tiny) and serve what the run exports",
}
