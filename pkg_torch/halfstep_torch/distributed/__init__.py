"""Parameters that are sharded over processes: the local elements, and the exchanges of processes."""
