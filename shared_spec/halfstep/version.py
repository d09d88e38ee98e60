"""The version of the distribution, with all of its packages."""

__version__ = "0.1.0"
