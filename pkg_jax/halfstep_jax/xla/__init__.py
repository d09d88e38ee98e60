"""Control of XLA: its exactness, and hints for speed."""
