"""An optimizer's state to a state dict and back, with all checks."""
