"""Runs of Keras, each in a process of its own: `python keras_runs.py BACKEND RUN ARGUMENTS`.

Keras reads its backend once, when it is imported.
"""

import importlib
import os
import pathlib
import sys
import warnings

BACKEND = sys.argv[1]
os.environ["KERAS_BACKEND"] = BACKEND
if BACKEND == "jax":
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"

import keras  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402

if BACKEND == "jax":
    import halfstep_jax as package
    from halfstep_jax.integrations.keras import KerasOptimizer
else:
    import halfstep_torch as package
    from halfstep_torch.integrations.keras import KerasOptimizer

X = np.random.default_rng(0).normal(size=(64, 16)).astype(np.float32)
Y = X[:, :10].argmax(-1)
# The default of weight_decay is Optax's in one package and torch's in the other.
EIGHT_BIT = "adamw(recipe='eight_bit', weight_decay=0.01)"


def model(optimizer) -> keras.Model:
    """Return a compiled model in bfloat16."""
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(64, "relu", name="hidden"), keras.layers.Dense(10, name="out")]
    for layer in layers:
        layer.dtype_policy = keras.DTypePolicy("bfloat16")
    made = keras.Sequential([keras.Input((16,)), *layers])
    made.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return made


def fit(made: keras.Model, epochs: int = 2) -> None:
    """Train in batches of 16, in order."""
    made.fit(X, Y, batch_size=16, epochs=epochs, verbose=0, shuffle=False)


def numbers(variables) -> list[np.ndarray]:
    """Return the values of variables, 16-bit floats in float32."""
    values = [keras.ops.convert_to_numpy(keras.ops.cast(v, "float32")) for v in variables]
    return [np.array(x) for x in values]


def small_updates(folder: pathlib.Path) -> None:
    """At 1e-5 Keras' AdamW changes no weight in bfloat16; ours changes many."""
    changed = {}
    for name, optimizer in {
        "keras": keras.optimizers.AdamW(1e-5),
        "ours": KerasOptimizer("adamw(recipe='one_pass')", 1e-5),
    }.items():
        made = model(optimizer)
        before = numbers(made.trainable_variables[::2])
        fit(made)
        after = numbers(made.trainable_variables[::2])
        changed[name] = np.mean(
            np.concatenate([(a != b).ravel() for a, b in zip(before, after, strict=True)])
        )
    assert changed["keras"] == 0
    assert changed["ours"] > 0.1


def resume(folder: pathlib.Path) -> None:
    """A model that was saved and loaded continues with the bits of the run that was not."""
    for optimizer in (EIGHT_BIT, "adamw(recipe='near_float32')", {"name": "lion", "recipe": "eight_bit"}):
        rate = keras.optimizers.schedules.CosineDecay(1e-3, 20)
        made = model(KerasOptimizer(optimizer, rate, clipnorm=1.0, gradient_accumulation_steps=2))
        fit(made)
        made.save(folder / "model.keras")
        loaded = keras.models.load_model(folder / "model.keras")
        for each in (made, loaded):
            fit(each)
        for a, b in zip(numbers(made.variables), numbers(loaded.variables), strict=True):
            np.testing.assert_array_equal(a, b)
        stores = {}, {}
        for each, store in zip((made, loaded), stores, strict=True):
            each.optimizer.save_own_variables(store)
        np.testing.assert_array_equal(stores[0]["state"], stores[1]["state"])


def steps(folder: pathlib.Path) -> None:
    """Take steps with drawn gradients, from a state file if there is one; write weights and state."""
    made = model(KerasOptimizer(EIGHT_BIT, 1e-2))
    made.optimizer.build(made.trainable_variables)
    rng = np.random.default_rng(1)
    weights = folder / "run.weights.h5"
    if weights.exists():
        made.load_weights(weights)
    else:
        for v in made.trainable_variables:
            v.assign(rng.normal(size=v.shape).astype(np.float32))
    for _ in range(3):
        grads = [
            keras.ops.cast(rng.normal(size=v.shape).astype(np.float32), "bfloat16")
            for v in made.trainable_variables
        ]
        made.optimizer.apply(grads, made.trainable_variables)
    made.save_weights(weights)
    store = {}
    made.optimizer.save_own_variables(store)
    arrays = {f"w{i}": x for i, x in enumerate(numbers(made.trainable_variables))}
    np.savez(folder / f"{BACKEND}.npz", **arrays, state=store["state"], count=store["0"])


def refuse(folder: pathlib.Path) -> None:
    """Bad arguments and files of other optimizers raise, and nothing changes."""
    other_package = "halfstep_torch" if BACKEND == "jax" else "halfstep_jax"
    theirs = importlib.import_module(f"{other_package}.integrations.keras")
    with pytest.raises(
        RuntimeError, match=f"the backend of Keras is '{BACKEND}'.* or use {package.__name__}"
    ):
        theirs.KerasOptimizer("adamw", 1e-3)
    with pytest.raises(TypeError, match=r"weight_decay=0\.1 would be rounded"):
        KerasOptimizer("adamw", 1e-3, weight_decay=0.1)
    with pytest.raises(ValueError, match="is not an optimizer"):
        KerasOptimizer("adamv", 1e-3)
    made = model(KerasOptimizer(EIGHT_BIT, 1e-3))
    fit(made)
    made.save_weights(folder / "run.weights.h5")
    other = model(KerasOptimizer("adamw(recipe='one_pass')", 1e-3))
    other.optimizer.build(other.trainable_variables)
    with pytest.raises(ValueError, match="load_state: "):
        other.load_weights(folder / "run.weights.h5")
    if BACKEND == "jax":
        tx = package.adamw(1e-3)
        with pytest.raises(TypeError, match=r"learning_rate=0\.001 beside a transform"):
            KerasOptimizer(tx, 1e-3)
        with pytest.raises(TypeError, match="learning_rate is missing"):
            KerasOptimizer("adamw")
        made = model(KerasOptimizer(tx))
        with pytest.raises(TypeError, match="cannot hold a transform"):
            made.save(folder / "tx.keras")
        with pytest.raises(ValueError, match="the rate is that of the transform"):
            made.optimizer.learning_rate = 1.0


def meshes(folder: pathlib.Path) -> None:
    """State is cut as its weights are, and the step has the bits of one device."""
    devices = keras.distribution.DeviceMesh(
        (1, 4), ("batch", "model"), devices=keras.distribution.list_devices()
    )
    layouts = keras.distribution.LayoutMap(devices)
    layouts[".*hidden.*kernel"] = (None, "model")
    rng = np.random.default_rng(0)
    grads = [rng.normal(size=shape).astype(np.float32) for shape in ((16, 64), (64,), (64, 10), (10,))]
    after = []
    for distribution in (None, keras.distribution.ModelParallel(layout_map=layouts, batch_dim_name="batch")):
        keras.distribution.set_distribution(distribution)
        made = model(KerasOptimizer("adamw(recipe='eight_bit')", 1e-2))
        for _ in range(3):
            made.optimizer.apply(list(map(keras.ops.convert_to_tensor, grads)), made.trainable_variables)
        after.append(numbers(made.trainable_variables))
    cut = [v.value for v in made.optimizer.variables if not v.value.sharding.is_fully_replicated]
    assert len(cut) >= 2
    assert {x.shape[0] for x in cut} == {16}
    for a, b in zip(*after, strict=True):
        np.testing.assert_array_equal(a, b)


if __name__ == "__main__":
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", "__array__ implementation")  # of Keras itself
    globals()[sys.argv[2]](pathlib.Path(sys.argv[3]))
