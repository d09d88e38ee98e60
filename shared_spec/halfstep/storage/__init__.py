"""How a state array is stored: what is no framework's of it."""
