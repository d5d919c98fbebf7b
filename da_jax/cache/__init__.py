"""What a sequence keeps between steps: pages of K and V, handed out on the host."""
