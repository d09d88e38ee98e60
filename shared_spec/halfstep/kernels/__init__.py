"""Kernels that are generated from a graph of elementwise operations, and built by a C compiler."""
