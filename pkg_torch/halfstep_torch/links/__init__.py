"""What a chain is made of: rules as links, read from a param group and bound to kinds of parameters."""
