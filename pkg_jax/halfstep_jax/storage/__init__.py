"""How an array of float32 is kept in fewer bits: codes, blocks, tables, formats."""
