"""Gradients before a step."""
