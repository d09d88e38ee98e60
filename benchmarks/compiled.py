"""What a step costs on accelerators that are not here: memory traffic of the compiled program, per parameter.

    make compiled          # in an environment of its own, with the compilers for TPU and CUDA

XLA compiles the whole step (our transform and `optax.apply_updates`, donated) ahead of time, on any x86 Linux
machine. The targets are a TPU v5e, a TPU v6e and an H100. For each setting: the floor, that is weights and
state read and written once and gradients read once; what the program moves; and its array-sized temporaries.
Exits with 1 if a setting moves more than it claims.

Nothing is run, so counts of instructions stand for the time of arithmetic. For the H100, where a step is one
kernel, PTX instructions per parameter are counted. Where NVIDIA's assembler is found, instructions of machine
code are counted too. Instructions of the integer pipe are also counted apart: twice their number bounds a
step too. No kernel of any step may have a product fused with a sum, in PTX or in machine code.
"""

import argparse
import collections
import dataclasses
import json
import math
import os
import pathlib
import sys
import tempfile
import time

# A compiler without a device: nothing is asked of a machine that is not there.
os.environ |= {
    "JAX_PLATFORMS": "cpu",
    "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5e-4",
    "TPU_TOPOLOGY": "2x2",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
}

import jax
import jax.numpy as jnp
import optax
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding
from programs import bytes_stored, faults, has_products, hbm_traffic, instructions, machine_code

import halfstep_jax as hs
from halfstep_spec import PARAM_STORAGES

# An H100 SXM, as its maker describes it: what the compiler asks of a device.
H100 = """
gpu_device_info {
  cuda_compute_capability { major: 9 }
  threads_per_warp: 32 threads_per_block_limit: 1024 threads_per_core_limit: 2048
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  shared_memory_per_block: 49152 shared_memory_per_block_optin: 232448 shared_memory_per_core: 233472
  core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98
  memory_bandwidth: 3352320000000 l2_cache_size: 52428800 device_memory_size: 84929347584
}
runtime_version { major: 13 minor: 0 }
dnn_version_info { major: 9 minor: 7 }
platform_name: "CUDA"
device_description_str: "NVIDIA H100 80GB HBM3"
"""
# Past the 128 MiB of on-chip memory of a TPU even at one byte per element, or XLA would keep arrays there.
LARGE = (32768, 8192)


@dataclasses.dataclass(frozen=True)
class Setting:
    """One program.

    Attributes:
        name: for the table.
        tx: the optimizer.
        most: claims: of each target, traffic over the floor at most; none where nothing is claimed.
        shape: of the weights, bfloat16.
        temporaries: claim: bytes per parameter on the H100 at most. LAMB keeps its update for the norm.
        instructions: claim: machine instructions per parameter on the H100 at most, and those of integers.
        exact: claim: bits are promised. LAMB16's power is compared within bounds (contract L4).
    """

    name: str
    tx: optax.GradientTransformationExtraArgs
    most: dict[str, float]
    shape: tuple[int, ...] = LARGE
    temporaries: float = 0.2
    instructions: tuple[int, int] | None = None
    exact: bool = True

    @property
    def one_kernel(self) -> bool:
        """Whether it claims to read and write everything once."""
        return 0 < self.most.get("h100", math.inf) < 1.01


_ONE_PASS = {"v5e": 1.001, "v6e": 1.001, "h100": 1.001}


def _adamw(**options):
    return hs.adamw(1e-3, weight_decay=0.1, **options)


def _one_pass_settings() -> list[Setting]:
    """Return the steps that claim to move every array once."""
    bf16 = {"mu_dtype": "bfloat16", "nu_dtype": "bfloat16"}
    storages = [name for name in PARAM_STORAGES if name != "stochastic"]
    return [
        Setting("AdamW, bfloat16 (default)", _adamw(), _ONE_PASS, instructions=(130, 65)),
        Setting(
            "bfloat16, fed back", _adamw(**bf16, param_storage="feedback"), _ONE_PASS, instructions=(135, 66)
        ),
        *(Setting(f"bfloat16, {name}", _adamw(**bf16, param_storage=name), _ONE_PASS) for name in storages),
        Setting("nu ufloat16_e7m9", _adamw(nu_dtype="ufloat16_e7m9"), _ONE_PASS),
        Setting(
            "one_pass (mulaw8, uroot4_e4m4)",
            _adamw(**hs.recipes.one_pass),
            _ONE_PASS,
            instructions=(125, 60),
        ),
        Setting("Lion, bfloat16", hs.lion(1e-4), _ONE_PASS),
        Setting("momentum, bfloat16", hs.sgd(1e-2, momentum=0.9), _ONE_PASS),
    ]


def _scaled_settings() -> list[Setting]:
    """Return the steps whose formats have scales: a maximum comes before the codes."""
    two_passes = {"v5e": 1.45, "v6e": 1.46, "h100": 1.44}
    by_row = {"v5e": 1.41, "v6e": 1.41, "h100": 1.44}

    def eight_bits(mu="float8_e4m3fn", nu="ufloat8_e5m3", block_size=128, min_ndim=2, **options):
        layout = {"block_size": block_size, "min_ndim": min_ndim}
        return _adamw(mu_dtype=hs.scaled(mu, **layout), nu_dtype=hs.scaled(nu, **layout), **options)

    fp8, row = eight_bits(), eight_bits(block_size="row")
    return [
        Setting("nu scaled float16", _adamw(nu_dtype=hs.scaled("float16")), dict.fromkeys(_ONE_PASS, 1.31)),
        Setting("fp8 (e4m3fn, ufloat8_e5m3)", fp8, two_passes),
        Setting(
            "fp8, split16", eight_bits(param_storage="split16"), {"v5e": 1.32, "v6e": 1.32, "h100": 1.32}
        ),
        Setting("int8, ufloat8_e5m3", eight_bits("int8", "ufloat8_e5m3"), two_passes),
        Setting("fp8 by row", row, by_row),
        Setting("fp8, one axis", eight_bits(min_ndim=1), by_row, (1 << 27,)),
        Setting("fp8, rows of 128", fp8, by_row, (1 << 20, 128)),
        Setting("fp8, convolution", fp8, two_passes, (3, 3, 4096, 4096)),
        Setting("fp8, short last block", fp8, by_row, (32768, 4000)),
        Setting("fp8 by row, 4,000 columns", row, by_row, (32768, 4000)),
        Setting(
            "fp8, row count not a multiple of 8", fp8, two_passes | {"v5e": 3.01, "v6e": 3.01}, (32764, 8192)
        ),
    ]


def _packed_and_whole_settings() -> list[Setting]:
    """Return the steps of packed codes, of codebooks, and of norms over an array, each with its claims."""
    return [
        Setting(
            "eight_bit (relative e3m4, uroot8)",
            _adamw(**hs.recipes.eight_bit),
            dict.fromkeys(_ONE_PASS, 1.33),
        ),
        Setting(
            "four_bit (relative int4, uroot8)",
            _adamw(**hs.recipes.four_bit),
            # Two maxima of blocks, the second after the first; on a TPU blocks of 32 cross its tiles.
            {"v5e": 11.5, "v6e": 11.3, "h100": 2.32},
            temporaries=2.0,
        ),
        Setting(
            "LAMB, bfloat16",
            hs.lamb(1e-3, weight_decay=0.1),
            {"v5e": 1.43, "v6e": 1.43, "h100": 1.72},
            temporaries=4.01,
        ),
        Setting(
            "LAMB16",
            hs.lamb16(1e-3, weight_decay=0.1),
            {"v5e": 1.85, "v6e": 1.87, "h100": 2.65},
            temporaries=4.03,
            exact=False,
        ),
        Setting(
            "8-bit codebooks",
            _adamw(mu_dtype=hs.codebook("dynamic8"), nu_dtype=hs.codebook("udynamic8")),
            {"v5e": 1.45, "v6e": 2.76, "h100": 2.64},
            temporaries=8.2,
        ),
    ]


def device_of(target: str):
    """Return a device of a target. One process at a time can ask for a TPU's."""
    if target == "h100":
        return topologies.get_topology_desc(platform="cuda", target_config=H100, topology="1x1x1").devices[0]
    return topologies.get_topology_desc(f"{target}:2x2", "tpu").devices[0]


def compile_step(setting: Setting, device) -> dict:
    """Return figures of one program, per parameter."""
    tx = setting.tx
    params = {"w": jax.ShapeDtypeStruct(setting.shape, jnp.bfloat16)}
    state = jax.eval_shape(tx.init, params)

    def step(params, state, gradients):
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    sharding = SingleDeviceSharding(device)
    arguments = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), (params, state, params)
    )
    n = math.prod(setting.shape)
    start = time.perf_counter()
    lowered = jax.jit(step, donate_argnums=(0, 1)).lower(*arguments)
    with tempfile.TemporaryDirectory() as folder:
        gpu = device.platform not in ("cpu", "tpu")
        compiled = lowered.compile(compiler_options={"xla_dump_to": folder} if gpu else None)
        row = {
            "floor": (3 * _bytes(params) + 2 * _bytes(state)) / n,
            "moved": hbm_traffic(compiled.as_text()) / n,
            "temporaries": compiled.memory_analysis().temp_size_in_bytes / n,
            "seconds": time.perf_counter() - start,
        }
        if gpu:
            kernels = [path.read_text() for path in pathlib.Path(folder).glob("*.ptx")]
            stored = (_bytes(params) + _bytes(state)) / n
            row |= _kernels(kernels, stored if setting.one_kernel else None)
    return row


def _kernels(kernels: list[str], stored: float | None) -> dict:
    """Return what the kernels of a step may not do, and the instructions of the one that is a whole step.

    Such a kernel stores `stored` bytes per parameter.
    """
    # Without a product there is nothing to fuse: most of the kernels prepare numbers and are short.
    codes = [machine_code(ptx) for ptx in kernels if has_products(ptx)]
    found = sum((collections.Counter(faults(ptx)) for ptx in kernels), collections.Counter())
    # A quotient and a root are made of an approximation and its correction.
    del found["approximate"]
    found["bytes spilled"] = sum(code.spilled for code in codes if code)
    found["fused by ptxas"] = sum(code.fused for code in codes if code)
    if not all(codes):
        found["kernels not read: NVIDIA's assembler is not here"] = codes.count(None)
    counts = {"faults": {name: count for name, count in found.items() if count}}
    if stored is not None:
        ptx = max(kernels, key=bytes_stored)
        elements, code = bytes_stored(ptx) / stored, machine_code(ptx)
        counts["ptx"] = instructions(ptx) / elements
        if code:
            counts |= {"machine": code.instructions / elements, "integer": code.integer / elements}
    return counts


def _bytes(tree) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def main() -> None:
    """Print the table and check the claims."""
    parser = argparse.ArgumentParser(description="Memory traffic of compiled steps, without an accelerator.")
    parser.add_argument("--json", type=pathlib.Path, help="also write the figures here")
    parser.add_argument("--only", nargs="*", help="these settings, by name")
    parser.add_argument("--targets", nargs="*", default=["v5e", "v6e", "h100"], help="for these devices")
    arguments = parser.parse_args()
    targets = {name: device_of(name) for name in arguments.targets}
    rows, broken = [], []
    columns = [f"{name:>7}{'x':>6}{'temp':>6}" for name in targets]
    print(f"{'bytes per parameter':32}{'floor':>7}", *columns, "instructions: PTX / machine (integer)")
    for setting in (*_one_pass_settings(), *_scaled_settings(), *_packed_and_whole_settings()):
        if setting.name not in (arguments.only or [setting.name]):
            continue
        line = []
        for name, device in targets.items():
            row = compile_step(setting, device)
            ratio = row["moved"] / row["floor"]
            rows.append({"setting": setting.name, "shape": setting.shape, "target": name, **row, "x": ratio})
            line.append(f"{row['moved']:7.2f}{ratio:6.2f}{row['temporaries']:6.2f}")
            if ratio > setting.most.get(name, math.inf):
                broken.append(f"{setting.name} on {name}: {ratio:.3f} over {setting.most[name]}")
            if "ptx" in row:
                machine, integer = row.get("machine", math.nan), row.get("integer", math.nan)
                line.append(f"{row['ptx']:7.0f} / {machine:.0f} ({integer:.0f})")
                most = setting.instructions
                if most and (machine > most[0] or integer > most[1]):
                    broken.append(f"{setting.name} on {name}: {machine:.0f} ({integer:.0f}) instructions")
            if row.get("faults") and setting.exact:
                broken.append(f"{setting.name} on {name}: {row['faults']}")
            if name == "h100" and setting.most and row["temporaries"] > setting.temporaries:
                broken.append(f"{setting.name} on {name}: {row['temporaries']:.2f} bytes of temporaries")
        print(f"{setting.name:32}{rows[-1]['floor']:7.2f}", *line, flush=True)
    if arguments.json:
        versions = {module.__name__: module.__version__ for module in (jax, optax)}
        arguments.json.write_text(json.dumps({"versions": versions, "rows": rows}, indent=1) + "\n")
    print("\nEvery claim holds." if not broken else "\n".join(["", "Broken:", *broken]))
    sys.exit(bool(broken))


if __name__ == "__main__":
    main()
