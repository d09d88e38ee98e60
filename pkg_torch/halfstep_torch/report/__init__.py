"""What is told of an optimizer, a run and a machine, and what it is measured by; nothing is changed."""
