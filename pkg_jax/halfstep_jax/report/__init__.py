"""Looking into a run: formats, bytes, and updates that are lost."""
