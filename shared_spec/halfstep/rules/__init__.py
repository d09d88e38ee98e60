"""Rules of both packages, each written once."""
