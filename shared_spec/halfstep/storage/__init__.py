"""How a state array is stored: the parts that belong to no framework."""
