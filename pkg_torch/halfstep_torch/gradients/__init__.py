"""Gradients before a step, or during backward."""
