"""One run that both frameworks can take on: the same rule, formats and weights, gradients from a record."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch

import halfstep_jax
import halfstep_torch

SHAPES = {"dense/kernel": (6, 16), "dense/bias": (16,), "conv/kernel": (3, 2, 8)}
SEED = 2**40 + 5


def record(steps: int, dtype: str) -> list[dict[str, np.ndarray]]:
    """Return weights and then gradients, as float32 numbers that `dtype` holds."""
    rng = np.random.default_rng(11)
    held = getattr(torch, dtype)
    return [
        {
            name: torch.from_numpy(rng.normal(size=shape).astype(np.float32)).to(held).float().numpy()
            for name, shape in SHAPES.items()
        }
        for _ in range(1 + steps)
    ]


def formats(package, text: str | None):
    """Return a format of a package.

    "int8/8" is scaled, "dynamic8/8" a table, "relative int4/8" relative, "fine int8/8" of a fine scale.
    """
    if text is None or not ("/" in text or text.startswith("relative")):
        return text
    name, _, size = text.removeprefix("relative ").partition("/")
    options = {"block_size": int(size), "min_size": 0, "min_ndim": 1} if size else {}
    if text.startswith("relative"):
        return package.relative(name, **{k: v for k, v in options.items() if k != "min_ndim"})
    if "dynamic" in name or "linear" in name:
        return package.codebook(name, **options)
    if name.startswith("fine "):
        return package.scaled(name.removeprefix("fine "), scale="fine", **options)
    return package.scaled(name, **options)


class JaxSide:
    """The run in JAX, jitted once."""

    def __init__(self, tx, dtype: str):
        self.tx, self.dtype = tx, getattr(jnp, dtype)

        def step(params, state, updates):
            updates, state = tx.update(updates, state, params)
            return optax.apply_updates(params, updates), state

        self._step = jax.jit(step)

    def tree(self, arrays):
        tree: dict = {}
        for name, x in arrays.items():
            outer, inner = name.split("/")
            tree.setdefault(outer, {})[inner] = jnp.asarray(x, self.dtype)
        return tree

    def start(self, arrays):
        self.params = self.tree(arrays)
        self.state = self.tx.init(self.params)

    def step(self, arrays):
        self.params, self.state = self._step(self.params, self.state, self.tree(arrays))

    def save(self, path):
        halfstep_jax.save_state(path, self.params, self.state, self.tx)

    def load(self, path):
        like = self.tree({name: np.zeros(shape) for name, shape in SHAPES.items()})
        self.params, self.state = halfstep_jax.load_state(path, like, self.tx)

    def leaves(self):
        return [np.asarray(x) for x in jax.tree.leaves((self.params, self.state))]


class Model(torch.nn.Module):
    """Parameters of the run's names."""

    def __init__(self, dtype: str):
        super().__init__()
        for name, shape in SHAPES.items():
            outer, inner = name.split("/")
            if not hasattr(self, outer):
                self.add_module(outer, torch.nn.Module())
            zeros = torch.zeros(shape, dtype=getattr(torch, dtype))
            getattr(self, outer).register_parameter(inner, torch.nn.Parameter(zeros))


class TorchSide:
    """The run in torch, eager."""

    def __init__(self, make, dtype: str):
        self._make, self._dtype = make, dtype
        self.start({name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()})

    @torch.no_grad()
    def start(self, arrays):
        self.model = Model(self._dtype)
        for name, p in self.model.named_parameters():
            p.copy_(torch.from_numpy(arrays[name.replace(".", "/")]))
        self.optimizer = self._make(list(self.model.named_parameters()))

    def step(self, arrays):
        for name, p in self.model.named_parameters():
            p.grad = torch.from_numpy(arrays[name.replace(".", "/")]).to(p.dtype)
        self.optimizer.step()

    def save(self, path):
        halfstep_torch.save_state(path, self.model, self.optimizer)

    def load(self, path):
        # As after a restart.
        self.start({name: np.ones(shape, np.float32) for name, shape in SHAPES.items()})
        halfstep_torch.load_state(path, self.model, self.optimizer)


def jax_run(tx, p, gradients, dtype: str = "bfloat16"):
    """Return the numbers of a weight in float32, and the state, after a jitted step for each gradient."""
    params = {"w": jnp.asarray(p, dtype)}
    state, update = tx.init(params), jax.jit(tx.update)
    for g in gradients:
        updates, state = update({"w": jnp.asarray(g, dtype)}, state, params)
        params = optax.apply_updates(params, updates)
    return np.asarray(params["w"], np.float32), state


def torch_run(make, p, gradients, dtype: str = "bfloat16"):
    """Return the same in torch, and the optimizer that `make` returned of the named weight."""
    w = torch.nn.Parameter(torch.tensor(p).to(getattr(torch, dtype)))
    optimizer = make([("w", w)])
    for g in gradients:
        w.grad = torch.tensor(g).to(w.dtype)
        optimizer.step()
    return w.detach().float().numpy(), optimizer


def assert_both_end_alike(make, draws: np.ndarray, **options) -> None:
    """Step a bfloat16 matrix by what make(package, chain) returns, in both: from draws[0], by the others."""
    ours, _ = jax_run(make(halfstep_jax, optax.chain), draws[0], draws[1:])
    tx = make(halfstep_torch, halfstep_torch.chain)
    theirs, _ = torch_run(lambda named: halfstep_torch.Optimizer(named, tx, **options), draws[0], draws[1:])
    np.testing.assert_array_equal(ours, theirs)
