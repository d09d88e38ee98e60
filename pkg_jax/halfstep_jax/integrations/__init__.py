"""Adapters for trainers, each of which imports its trainer."""
