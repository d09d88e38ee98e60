"""The parameters of an optimizer: their names, their memory, and the checks of parameters and state."""
