"""The state file: the layout in which a run moves between frameworks."""
