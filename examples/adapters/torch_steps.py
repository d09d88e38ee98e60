"""What the adapters of torch optimizers share: steps of AdamW, from patterns and back to patterns."""

import numpy as np
import torch

_PATTERNS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def to_tensor(array, bits=None):
    """Return patterns as a tensor of their own dtype."""
    bits = np.ascontiguousarray(array.bits if bits is None else bits)
    signed = torch.from_numpy(bits.view(f"int{8 * bits.itemsize}").copy())
    return signed.view(getattr(torch, array.dtype))


def to_patterns(tensor, like):
    """Return a tensor as the patterns that a case expects."""
    bits = tensor.detach().contiguous().view(_PATTERNS[tensor.element_size()]).numpy()
    return like.dtype, bits.view(f"uint{8 * bits.itemsize}")


def number(case, name):
    """Return a number of a case."""
    return float(case.inputs[name].bits.view(np.float32))


def asks_for_adamw(case, storages=("nearest",)):
    """Whether a case asks for what AdamW classes have: plain moments, to nearest, and decoupled decay."""
    a = case.arguments
    plain = all(
        isinstance(a[name], str) and a[name] in ("float32", "bfloat16") for name in ("mu_dtype", "nu_dtype")
    )
    roundings = {a["mu_rounding"], a["nu_rounding"]} - (
        {"auto", "stochastic"} if "float32" == a["nu_dtype"] else set()
    )
    storage = a["param_storage"] in storages or case.inputs["p"].dtype == "float32"
    special = a.get("nesterov") or number(case, "eps_root") != 0
    return plain and roundings <= {"nearest"} and storage and a["decay"] == "decoupled" and not special


def take_steps(case, make, keys):
    """Take the steps of a case.

    Args:
        case: of the op adam_step.
        make: from a parameter and AdamW's arguments to an optimizer.
        keys: of the two moments in its state.
    """
    p = torch.nn.Parameter(to_tensor(case.inputs["p"]))
    betas = (number(case, "b1"), number(case, "b2"))
    options = {"eps": number(case, "eps"), "weight_decay": number(case, "weight_decay")}
    optimizer = make([p], lr=number(case, "learning_rate"), betas=betas, **options)
    # Its own state, with the numbers of the case: one step on zeros makes the arrays.
    before = p.detach().clone()
    p.grad = torch.zeros_like(p)
    optimizer.step()
    state = optimizer.state[p]
    count = int(case.inputs["count"].bits)
    state["step"] = torch.full_like(state["step"], count) if torch.is_tensor(state["step"]) else count
    rows = []
    with torch.no_grad():
        p.copy_(before)
        for name, key in zip(("mu", "nu"), keys, strict=True):
            moment = to_tensor(case.inputs[name])
            if state[key].dtype != moment.dtype:
                raise NotImplementedError(f"it keeps {name} in {state[key].dtype}")
            state[key].copy_(moment)
    g = case.inputs["g"]
    for bits in g.bits:
        # torch wants gradients in the dtype of the weight.
        grad = to_tensor(g, bits)
        if not torch.equal(grad.to(p.dtype).to(grad.dtype), grad):
            raise NotImplementedError(f"gradients in {grad.dtype} of weights in {p.dtype}")
        p.grad = grad.to(p.dtype)
        optimizer.step()
        rows.append([x.detach().clone() for x in (p, *(state[key] for key in keys))])
    columns = zip(("p", "mu", "nu"), map(torch.stack, zip(*rows, strict=True)), strict=True)
    return {name: to_patterns(x, case.outputs[name]) for name, x in columns}
