"""The ways to store a weight."""
