"""What the state dict of an optimizer holds, and what one must hold to be loaded."""
