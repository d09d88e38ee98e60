"""The parameters of an optimizer: their names, their memory, and what they and their state must be."""
