"""Attention kernels over paged keys and values. Knows nothing of models, modes or tokens."""
