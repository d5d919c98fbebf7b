"""Flax NNX models. A model maps tokens to hidden states and leaves attention to an `Attend`."""
