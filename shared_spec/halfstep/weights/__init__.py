"""Weight storages with arithmetic that both packages share. Contract: section P."""
