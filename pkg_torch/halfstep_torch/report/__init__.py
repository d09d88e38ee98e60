"""Reports on an optimizer, a run and a machine. They change nothing."""
