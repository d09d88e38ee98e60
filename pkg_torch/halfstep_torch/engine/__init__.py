"""The torch step: from parameters to rows, stages and kernels, and back."""
