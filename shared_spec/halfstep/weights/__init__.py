"""Ways to store a weight whose arithmetic both packages share. Contract: section P."""
