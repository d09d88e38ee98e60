"""Storage of float32 arrays in fewer bits: codes, blocks, tables, formats."""
