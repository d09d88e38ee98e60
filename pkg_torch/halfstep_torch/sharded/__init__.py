"""The step of sharded parameters. A step of plain tensors does not enter here."""
