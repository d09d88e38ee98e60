"""Links of a chain: rules that are read from a param group and bound to kinds of parameters."""
