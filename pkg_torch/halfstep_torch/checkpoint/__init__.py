"""State files: weights and optimizer state in the layout that both packages read."""
