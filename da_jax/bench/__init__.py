"""Measures the engine: against transformers, and against what the visible pages predict."""
