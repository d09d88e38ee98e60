"""Generated C kernels as custom calls of XLA on a CPU: one call computes the step of all leaves."""
