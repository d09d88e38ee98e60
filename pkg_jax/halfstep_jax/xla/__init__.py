"""What JAX and XLA make of a step, and how they are kept from changing its bits."""
