"""Parameters whose elements lie in several processes: which are here, and what processes tell each other."""
