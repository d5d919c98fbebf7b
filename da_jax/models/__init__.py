"""Flax NNX models, one file a family. What sequences keep is behind a `layers.Cache`."""
