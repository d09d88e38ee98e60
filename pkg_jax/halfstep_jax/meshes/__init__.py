"""Weights and state on meshes."""
