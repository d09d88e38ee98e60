"""Launches of warm steps, in Triton's interpreter: `python -m gpu_bits.counted_launches NAME...`

Prints of each case how many kernels a step launches after the second one, and which operations of torch it
calls beside them that a GPU would launch too. TRITON_INTERPRET=1 must be set before Triton is imported.
"""

import json
import sys
import unittest.mock
import warnings

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime import interpreter

import halfstep_torch as hs
from gpu_bits.interpreted_steps import as_on_gpu

ARRAYS = 12  # of one kind of storage; the interpreter takes long
# Operations that launch nothing on a GPU. All tables of a step are copied there at once.
FREE = {"empty", "as_strided", "view", "slice", "select", "unbind", "detach", "alias", "_to_copy"}
FREE |= {"_record_function_enter_new", "_record_function_exit"}


def clipped(params, compile):
    links = (
        hs.clip_by_global_norm(1e-3),
        hs.scale_by_adam(nu_dtype="bfloat16"),
        hs.scale_by_learning_rate(1e-3),
    )
    return hs.Optimizer(params, hs.chain(*links, hs.round_stochastically()), compile=compile)


CASES = {
    "default": hs.AdamW,
    "Lamb16": hs.Lamb16,
    "clipping": clipped,
}


class _Operations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def counted(name: str) -> dict:
    """Return the launches of a step, and the operations beside them."""
    params = [(f"w{i}", torch.nn.Parameter(torch.ones(2, 8).bfloat16())) for i in range(ARRAYS)]
    optimizer, launches, operations = CASES[name](params, compile=True), [], _Operations()
    run = interpreter.InterpretedFunction.run

    def noted(function, *args, **kwargs):
        launches.append(function.fn.__name__)
        count = len(operations.names)
        made = run(function, *args, **kwargs)
        del operations.names[count:]  # of the interpreter
        return made

    with unittest.mock.patch.object(interpreter.InterpretedFunction, "run", noted):
        for _ in range(3):
            for _, p in params:
                p.grad = torch.ones_like(p)
            launches.clear()
            operations.names.clear()
            with operations:
                optimizer.step()
    return {"launches": launches, "operations": sorted({*operations.names} - FREE)}


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    with as_on_gpu():
        print(json.dumps({name: counted(name) for name in sys.argv[1:]}))
