"""What a response costs by arithmetic: the paper's estimate, and ours for any model and chip.

Nothing here imports JAX or needs weights. `paper` reproduces the paper's table; `step` is the time
of one decode step of a batch; `workload` says what the steps of a response see.
"""
