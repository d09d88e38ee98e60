"""Kernels that are generated from a stage: a graph, C or Triton source, and one call for all parameters."""
