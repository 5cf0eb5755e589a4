"""What the collector measures: a kernel, its configs, its shapes, and what a right result is.

A config has three sorts of fields, told apart by the kernel's own parameters. Constexprs and
options (num_warps, num_stages) make another binary. Plain parameters are passed at the launch. What
the kernel does not take concerns the grid alone. One binary serves all shapes and configs that
Triton specialises alike.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import itertools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

Shape = dict[str, Any]  # {"m": 4096, "n": 8192}
Config = dict[str, Any]  # {"BLOCK": 1024, "num_warps": 4}
Args = dict[str, Any]  # by the kernel's parameters

OPTIONS = ("num_warps", "num_stages")
SMS = 132  # of an H200: what a WAVES field counts in


@dataclass(frozen=True)
class Subject:
    """One kernel of ours."""

    name: str
    family: str
    kernel: Any  # a JITFunction
    space: Mapping[str, Sequence[Any]]
    shapes: Sequence[Shape]
    tiny: Shape  # for the interpreter
    make: Callable[[Shape, torch.dtype, str], Args]
    reference: Callable[[Args], Sequence[torch.Tensor]]
    outputs: Sequence[str]
    grid: Callable[[Shape, Config], tuple[int, ...]]
    work: Callable[[Shape, int], tuple[float, float]]  # with the bytes of an element: bytes, flops
    trips: Callable[[Shape, Config], float]  # of the innermost loop, in one program
    dtypes: Sequence[str] = ("bfloat16", "float16")
    constants: Callable[[Shape], Config] = lambda shape: {}  # constexprs that the shape decides
    fits: Callable[[Config], bool] = lambda config: True  # with or without the shape's constants
    result: Callable[[Args], Sequence[torch.Tensor]] | None = None  # if not the outputs themselves
    adds: bool = False  # into its outputs, which begin at zero
    loses: float = 0.0  # relative error that it makes by design

    @functools.cached_property
    def configs(self) -> list[Config]:
        """All configs, in an order that a hash decides: any first part is a fair sample."""
        names, values = list(self.space), self.space.values()
        found = [dict(zip(names, each, strict=True)) for each in itertools.product(*values)]
        usable = [config for config in found if self.fits(config)]
        return sorted(usable, key=lambda config: key_of(self.name, config))

    @functools.cached_property
    def constexprs(self) -> set[str]:
        found = inspect.signature(self.kernel.fn).parameters.values()
        return {each.name for each in found if "constexpr" in str(each.annotation)}

    @functools.cached_property
    def parameters(self) -> list[str]:
        return list(inspect.signature(self.kernel.fn).parameters)

    def results(self, args: Args) -> Sequence[torch.Tensor]:
        return self.result(args) if self.result else [args[name] for name in self.outputs]


@dataclass(frozen=True)
class Task:
    """A kernel on one shape and dtype: configs are compared within it."""

    subject: Subject
    shape: Shape = field(hash=False)
    dtype: str

    @functools.cached_property
    def id(self) -> str:
        return key_of(self.subject.name, self.shape, self.dtype)

    def make(self, device: str) -> Args:
        return self.subject.make(self.shape, getattr(torch, self.dtype), device)

    @functools.cached_property
    def plain(self) -> Args:
        """The arguments without memory."""
        return self.make("meta")

    def compile_fields(self, config: Config) -> Config:
        """Constexprs and options: of the config, and of the shape."""
        chosen = {*self.subject.constexprs, *OPTIONS}
        mine = {name: value for name, value in config.items() if name in chosen}
        return {**mine, **self.subject.constants(self.shape)}

    def launch_fields(self, config: Config) -> Config:
        """Fields that are plain parameters of the kernel."""
        plain = set(self.subject.parameters) - self.subject.constexprs
        return {name: value for name, value in config.items() if name in plain}

    def binary_key(self, config: Config) -> str:
        """Equal where Triton would compile equal code: dtypes, constants, and how ints are."""
        own = self._kinds(self.launch_fields(config))
        return key_of(self.subject.name, self._plain_kinds, own, self.compile_fields(config))

    @functools.cached_property
    def _plain_kinds(self) -> str:
        return json.dumps(self._kinds(self.plain), sort_keys=True)

    def _kinds(self, args: Args) -> dict[str, str]:
        same = {each.name for each in self.subject.kernel.params if each.do_not_specialize}
        return {name: "any" if name in same else _specialised(args[name]) for name in args}

    def takes(self, config: Config) -> bool:
        return self.subject.fits({**config, **self.subject.constants(self.shape)})

    def grid(self, config: Config) -> tuple[int, int, int]:
        given = self.subject.grid(self.shape, config)
        x, y, z = (*given, 1, 1)[:3]
        return x, y, z

    @functools.cached_property
    def work(self) -> tuple[float, float]:
        return self.subject.work(self.shape, getattr(torch, self.dtype).itemsize)


def _specialised(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return str(value.dtype)
    if isinstance(value, int) and not isinstance(value, bool):
        width = "i32" if -(2**31) <= value < 2**31 else "i64"
        return "1" if value == 1 else f"{width}{' 16' * (value % 16 == 0)}"
    return type(value).__name__


def key_of(*parts: Any) -> str:
    """Return a short hash that any machine and any version of Python computes alike."""
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:20]


def blocks(size: int, block: int) -> int:
    return -(-size // block)


def always(shape: Shape, config: Config) -> float:
    """For kernels without a loop."""
    return 1.0


def shape_kind(shape: Shape) -> str:
    """Return the part of the plan that a shape is from: power of two, prime, odd or model."""
    sizes = [v for v in shape.values() if isinstance(v, int) and not isinstance(v, bool) and v > 8]
    if all(size & (size - 1) == 0 for size in sizes):
        return "power of two"
    if any(is_prime(size) for size in sizes):
        return "prime"
    return "odd" if any(size % 16 for size in sizes) else "model"


def is_prime(number: int) -> bool:
    return all(number % d for d in range(2, math.isqrt(number) + 1))
