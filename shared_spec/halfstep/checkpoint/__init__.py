"""State files: weights and optimizer state in one layout, whatever the framework."""
