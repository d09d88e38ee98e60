"""A run to a file and back, in the layout that both packages read; its weights and state in float32."""
