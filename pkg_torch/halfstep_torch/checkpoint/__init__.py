"""Saving and loading a run in the file layout of both packages, and its weights and state in float32."""
