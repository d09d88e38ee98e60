"""Generated kernels: on a CPU one custom call of XLA steps all leaves, on a GPU calls of Pallas."""
