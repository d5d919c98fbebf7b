"""The command line, `da-jax`."""
