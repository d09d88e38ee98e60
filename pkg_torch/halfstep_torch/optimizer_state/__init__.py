"""An optimizer to a state dict and back: what one holds, and what it must hold to be loaded."""
