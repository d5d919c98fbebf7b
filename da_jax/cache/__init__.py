"""What a sequence keeps between steps: pages of keys and values, rings and states."""
