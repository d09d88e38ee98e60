"""What happens to gradients before a step, or during backward."""
