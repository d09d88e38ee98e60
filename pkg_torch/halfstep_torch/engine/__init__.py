"""From parameters to the memory that a plan works on, and back."""
