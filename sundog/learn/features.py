"""What the cost model sees of a kernel, a shape and a config, as a row of numbers.

    features = matrix([known])            # one line per config; NaN where something is not known

`known` holds the kernel's name, its dtype, shape and config, the launch (grid, trips, bytes, flops)
and, once it is compiled, registers, spills, shared memory and the text of its TTGIR. Nothing that
is measured is among them.
"""

from __future__ import annotations

import functools
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy

__all__ = ["COMPILED", "NAMES", "count_ir", "matrix", "roofline_s"]

BYTES_PER_S = 4.27e12  # what a copy reaches on an H200: docs/measured.md
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
    "bits", "bytes", "flops", "intensity", "roofline_us", "programs", "grid_x", "grid_y", "trips",
    "bytes_per_program", "flops_per_program", "waves", "tail",
)  # fmt: skip
COMPILED = (
    "registers", "spills", "shared", "occupancy", "resident_waves", "resident_tail", "operations",
    "largest_tile", "largest_0", "largest_1", "per_thread", "size_per_thread", *_OPS,
)  # fmt: skip
NAMES = (
    "kernel", *(f"shape_{name}" for name in _SHAPE), *(f"config_{name}" for name in _CONFIG),
    *_LAUNCH, *COMPILED,
)  # fmt: skip

_OPERATION = re.compile(r'(?:= |^ *)"?([a-z]+\.[a-z_0-9.]+)', re.M)
_TENSOR = re.compile(r"tensor<((?:\d+x)+)")
_PER_THREAD = re.compile(r"sizePerThread = \[([\d, ]+)\]")


def roofline_s(nbytes: float, flops: float, dtype: str) -> float:
    """Return the seconds below which no config comes, by bytes and by arithmetic."""
    return max(nbytes / BYTES_PER_S, flops / FLOPS_PER_S[dtype])


def matrix(known: Sequence[Mapping[str, Any]], kernels: Sequence[str] = ()) -> numpy.ndarray:
    """Return a line of features for each; `kernels` are those that the model was trained on."""
    numbers = {name: float(number) for number, name in enumerate(kernels)}
    lines = [_line(each, numbers) for each in known]
    return numpy.array([[line.get(name, math.nan) for name in NAMES] for line in lines])


def _line(known: Mapping[str, Any], kernels: Mapping[str, float]) -> dict[str, float]:
    line = {"kernel": kernels.get(known["kernel"], math.nan)}
    line |= {f"shape_{n}": _log(known["shape"][n]) for n in _SHAPE if n in known["shape"]}
    line |= {f"config_{n}": _log(known["config"][n]) for n in _CONFIG if n in known["config"]}
    line |= _launch(known)
    return {**line, **_compiled(known, line["programs"])}


def _launch(known: Mapping[str, Any]) -> dict[str, float]:
    nbytes, flops, dtype = known["bytes"], known["flops"], known["dtype"]
    programs = math.prod(known["grid"])
    per_sm = programs / SMS
    return {
        "bits": BITS[dtype], "bytes": _log(nbytes), "flops": _log(flops),
        "intensity": _log((flops + 1) / (nbytes + 1)),
        "roofline_us": _log(1e6 * roofline_s(nbytes, flops, dtype)),
        "programs": _log(programs), "grid_x": _log(known["grid"][0]),
        "grid_y": _log(known["grid"][1]), "trips": _log(known["trips"]),
        "bytes_per_program": _log(nbytes / programs), "flops_per_program": _log(flops / programs),
        "waves": _log(per_sm), "tail": math.ceil(per_sm) / per_sm,
    }  # fmt: skip


def _compiled(known: Mapping[str, Any], log_programs: float) -> dict[str, float]:
    """Features of the compiled kernel; none where it is not compiled, or failed to."""
    if not known.get("ttgir_text"):
        return {}
    warps = known["config"].get("num_warps", 4)
    counts = dict(count_ir(known["ttgir_text"]))
    line = {name: _log(value + 1) for name, value in counts.items() if name != "size_per_thread"}
    line |= {"size_per_thread": _log(counts["size_per_thread"])}
    line |= {"per_thread": _log(counts["largest_tile"] / (32 * warps)), "shared": known["shared"]}
    if known.get("registers") is not None:
        line |= {"registers": known["registers"], "spills": known["spills"]}
        line |= {"occupancy": known["occupancy"]}
        at_once = SMS * max(known["occupancy"] * 64 / warps, 1)
        waves = 2**log_programs / at_once
        line |= {"resident_waves": _log(waves), "resident_tail": math.ceil(waves) / waves}
    return line


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


def _log(value: float) -> float:
    return math.log2(value) if value > 0 else -1.0
