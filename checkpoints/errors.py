"""What is wrong with a checkpoint."""


class CheckpointError(ValueError):
    """A checkpoint that cannot be loaded as it is; the message lists every fault."""
