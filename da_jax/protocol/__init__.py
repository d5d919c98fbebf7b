"""The Declarative Attention protocol: tags, modes, chunks, prompts, visibility, account. No JAX."""
