"""The rows of a kernel's table (`halfstep.kernels.c_driver.FIELDS`)."""

from collections.abc import Sequence

from torch import Tensor

from halfstep_torch.distributed.window import Window
from halfstep_torch.engine.stage import Stage


def row_of(stage: Stage, window: Window, arrays: Sequence[Tensor]) -> list[int]:
    """Return the row of a parameter.

    Args:
        stage: the parameter's own stage, which may end in short blocks.
        window: the elements in this process.
        arrays: weights, gradient, update if the stage leaves one, and state, all contiguous.
    """
    elements, run = arrays[0].numel(), (stage.blocks[0].run or 0) if stage.blocks else 0
    first = 0 if window.is_empty else window.first
    return [elements, run, first, max(window.run, 1), window.skip or 0, *(x.data_ptr() for x in arrays)]
