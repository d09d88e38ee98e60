"""What a state file is: the layout in which a run moves between frameworks."""
