"""Checkpoints: Hugging Face safetensors and Orbax, in and out, without torch."""
