"""What happens to gradients before a step."""
