"""The transforms, each with its alias."""
