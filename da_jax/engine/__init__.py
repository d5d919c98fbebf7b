"""The engine: requests in, tokens out, and an exact account of what each step attended."""
