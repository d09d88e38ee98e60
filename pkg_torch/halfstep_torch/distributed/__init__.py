"""Parameters that are sharded over processes: which elements are local, and what processes exchange."""
