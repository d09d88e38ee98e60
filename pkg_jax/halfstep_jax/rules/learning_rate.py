"""The learning rate as an Optax transform.

Contract: section D.
"""

from halfstep.rules.learning_rate import ScaleByLearningRate
from halfstep_jax.transform import transform_of

scale_by_learning_rate = transform_of(ScaleByLearningRate)
