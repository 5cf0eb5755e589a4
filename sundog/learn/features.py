"""The cost model's features of a kernel, a shape and a config, as a row of numbers.

    features = matrix([known])            # one line per config; NaN where something is not known

`known` holds the kernel's name, its dtype, shape and config, the launch (grid, trips, bytes, flops)
and, once it is compiled, registers, spills, shared memory and the text of its TTGIR. It has no
measurements. An unknown value is NaN, and so is everything that depends on it.
"""

from __future__ import annotations

import functools
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy

BYTES_PER_S = 4.27e12  # the rate of a copy on an H200: docs/measured.md
FLOPS_PER_S = {"float32": 3.9e14, "float16": 7.8e14, "bfloat16": 7.8e14, "float8_e4m3fn": 1.5e15}
BITS = {"float32": 32.0, "float16": 16.0, "bfloat16": 16.0, "float8_e4m3fn": 8.0}
SMS = 132

_SHAPE = ("m", "n", "k", "batch", "groups", "heads", "seq", "dim", "tokens", "pairs", "size")
_CONFIG = (
    "BLOCK", "BLOCK_M", "BLOCK_N", "BLOCK_K", "BLOCK_T", "BLOCK_H", "ROWS", "GROUP_M", "GROUPS",
    "WAVES", "splits", "share", "num_warps", "num_stages",
)  # fmt: skip
_OPS = (
    "tt.load", "tt.store", "tt.dot", "ttng.warp_group_dot", "tt.reduce", "tt.scan",
    "tt.atomic_rmw", "ttg.convert_layout", "ttg.async_copy_global_to_local", "ttg.local_alloc",
    "ttg.local_load", "ttg.local_store", "scf.for", "scf.while", "scf.if", "math.exp2", "math.exp",
    "arith.divf", "arith.remsi", "tt.trans",
)  # fmt: skip
_LAUNCH = (
    "bits", "bytes", "programs", "grid_x", "grid_y", "bytes_per_program", "waves", "tail",
    "threads", "bytes_per_thread",
)  # fmt: skip
_WORK = (
    "flops", "intensity", "roofline_us", "trips", "flops_per_program", "steps", "bytes_per_trip",
    "bytes_per_thread_trip",
)  # fmt: skip
_PADDED = (  # a size and the block that covers it: what is computed over what is needed
    ("n", "BLOCK"), ("m", "BLOCK_M"), ("n", "BLOCK_N"), ("k", "BLOCK_K"), ("m", "ROWS"),
    ("seq", "BLOCK_M"), ("seq", "BLOCK_N"),
)  # fmt: skip
_ALIGNED = ("m", "n", "k", "seq", "dim")
_OF_SHAPE = (
    *(f"shape_{name}" for name in _SHAPE), "layout", "causal",
    *(f"pad_{size}_{block}" for size, block in _PADDED), "pad_power", "block_over_n",
    *(f"align_{name}" for name in _ALIGNED),
)  # fmt: skip
_RESIDENT = (
    "registers", "spills", "occupancy", "resident_waves", "resident_tail", "active", "active_warps",
    "resident_steps", "in_flight", "tile_in_flight", "bytes_at_once",
)  # fmt: skip
COMPILED = (
    *_RESIDENT, "shared", "operations", "largest_tile", "largest_0", "largest_1", "per_thread",
    "size_per_thread", "instructions", *_OPS,
)  # fmt: skip
NAMES = ("kernel", *_OF_SHAPE, *(f"config_{name}" for name in _CONFIG), *_LAUNCH, *_WORK, *COMPILED)
# Known or unknown together: for a kernel that is not ours, or one that is not compiled.
GROUPS = {
    "shape": _OF_SHAPE,
    "work": (*_WORK, "resident_steps", "bytes_at_once", "instructions"),
    "compiled": COMPILED,
}
_LAYOUTS = ("nn", "nt", "tn", "tt")

_OPERATION = re.compile(r'(?:= |^ *)"?([a-z]+\.[a-z_0-9.]+)', re.M)
_TENSOR = re.compile(r"tensor<((?:\d+x)+)")
_PER_THREAD = re.compile(r"sizePerThread = \[([\d, ]+)\]")


def roofline_s(nbytes: float, flops: float, dtype: str) -> float:
    """Return the least seconds of any config, by bytes and by arithmetic."""
    return max(nbytes / BYTES_PER_S, flops / FLOPS_PER_S.get(dtype, FLOPS_PER_S["float32"]))


def matrix(known: Sequence[Mapping[str, Any]], kernels: Sequence[str] = ()) -> numpy.ndarray:
    """Return a line of features for each. `kernels` are those that the model was trained on."""
    numbers = {name: float(number) for number, name in enumerate(kernels)}
    lines = [_line(each, numbers) for each in known]
    return numpy.array([[line.get(name, math.nan) for name in NAMES] for line in lines])


def _line(known: Mapping[str, Any], kernels: Mapping[str, float]) -> dict[str, float]:
    config = known["config"]
    line = {"kernel": kernels.get(known["kernel"], math.nan)}
    line |= {f"config_{n}": _log(config[n]) for n in _CONFIG if n in config}
    line |= _of_shape(known["shape"], config)
    line |= _launch(known)
    return {**line, **_compiled(known)}


def _of_shape(shape: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, float]:
    line = {f"shape_{n}": _log(shape[n]) for n in _SHAPE if n in shape}
    line |= {f"align_{n}": _log(math.gcd(shape[n], 128)) for n in _ALIGNED if n in shape}
    for size, block in _PADDED:
        if size in shape and block in config:
            line[f"pad_{size}_{block}"] = _up(shape[size], config[block]) / shape[size]
    if "n" in shape:
        line["pad_power"] = 2 ** math.ceil(math.log2(shape["n"])) / shape["n"]
        line["block_over_n"] = _log(config.get("BLOCK", math.nan) / shape["n"])
    if shape.get("layout") in _LAYOUTS:
        line["layout"] = _LAYOUTS.index(shape["layout"])
    return {**line, **({"causal": float(shape["causal"])} if "causal" in shape else {})}


def _launch(known: Mapping[str, Any]) -> dict[str, float]:
    nbytes, flops, trips, dtype = (known[name] for name in ("bytes", "flops", "trips", "dtype"))
    programs = math.prod(known["grid"])
    per_sm, threads = programs / SMS, 32 * programs * known["config"].get("num_warps", 4)
    return {
        "bits": BITS.get(dtype, math.nan), "bytes": _log(nbytes), "flops": _log(flops),
        "intensity": _log((flops + 1) / (nbytes + 1)),
        "roofline_us": _log(1e6 * roofline_s(nbytes, flops, dtype)),
        "programs": _log(programs), "grid_x": _log(known["grid"][0]),
        "grid_y": _log(known["grid"][1]), "trips": _log(trips), "threads": _log(threads),
        "bytes_per_program": _log(nbytes / programs), "flops_per_program": _log(flops / programs),
        "bytes_per_thread": _log(nbytes / threads),
        "bytes_per_trip": _log(nbytes / programs / trips),
        "bytes_per_thread_trip": _log(nbytes / threads / trips),
        "waves": _log(per_sm), "tail": math.ceil(per_sm) / per_sm,
        "steps": _log(math.ceil(per_sm) * trips),
    }  # fmt: skip


def _compiled(known: Mapping[str, Any]) -> dict[str, float]:
    """Return features of the compiled kernel; none if it was not compiled, or failed to."""
    if not known.get("ttgir_text"):
        return {}
    warps = known["config"].get("num_warps", 4)
    counts = dict(count_ir(known["ttgir_text"]))
    line = {name: _log(value + 1) for name, value in counts.items() if name != "size_per_thread"}
    line |= {"size_per_thread": _log(counts["size_per_thread"])}
    each = counts["largest_tile"] / (32 * warps)
    work = math.ceil(math.prod(known["grid"]) / SMS) * known["trips"] * warps
    line |= {"per_thread": _log(each), "shared": known["shared"]}
    line |= {"instructions": _log(work * max(each, 1) * counts["operations"])}
    if known.get("registers") is None:
        return line
    return {**line, **_resident(known, counts["largest_tile"])}


def _resident(known: Mapping[str, Any], tile: float) -> dict[str, float]:
    """Return features of all programs that an SM holds at once."""
    warps, programs = known["config"].get("num_warps", 4), math.prod(known["grid"])
    resident = max(known["occupancy"] * 64 / warps, 1)
    waves = programs / (SMS * resident)
    active = min(resident, math.ceil(programs / SMS))
    size = BITS.get(known["dtype"], math.nan) / 8
    return {
        "registers": known["registers"], "spills": known["spills"],
        "occupancy": known["occupancy"], "resident_waves": _log(waves),
        "resident_tail": math.ceil(waves) / waves, "active": _log(active),
        "active_warps": active * warps, "resident_steps": _log(math.ceil(waves) * known["trips"]),
        "in_flight": _log(active * max(known["shared"], 1)),
        "tile_in_flight": _log(active * tile * size),
        "bytes_at_once": _log(active * known["bytes"] / programs / known["trips"]),
    }  # fmt: skip


def occupancy(registers: int, shared: int, num_warps: int) -> float:
    """Return the warps that an SM of sm_90 holds of this kernel, as a part of its 64."""
    per_warp = -(-max(registers, 1) * 32 // 256) * 256
    by_registers = 65536 // (per_warp * num_warps)
    by_shared = (228 << 10) // (shared + 1024)  # the driver keeps 1 KiB for each program
    programs = min(by_registers, by_shared, 64 // num_warps, 32)
    return programs * num_warps / 64


@functools.lru_cache(maxsize=20_000)
def count_ir(text: str) -> tuple[tuple[str, float], ...]:
    """Count operations, and describe the largest tile, of a TTGIR module."""
    found = Counter(_OPERATION.findall(text))
    shapes = {each: [int(n) for n in each.split("x") if n] for each in _TENSOR.findall(text)}
    largest = max(shapes.values(), key=math.prod, default=[1])
    layouts = [math.prod(map(int, each.split(","))) for each in _PER_THREAD.findall(text)]
    line: dict[str, float] = {name: found[name] for name in _OPS}
    line |= {"operations": sum(found.values()), "largest_tile": math.prod(largest)}
    line |= {"largest_0": largest[0], "largest_1": largest[1] if len(largest) > 1 else 0}
    return tuple({**line, "size_per_thread": max(layouts, default=1)}.items())


def _up(size: int, block: int) -> int:
    return -(-size // block) * block


def _log(value: float) -> float:
    if math.isnan(value):
        return value
    return math.log2(value) if value > 0 else -1.0
