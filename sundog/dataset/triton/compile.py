"""A kernel's TTIR and TTGIR, on any machine: Triton's own first two stages, without a driver.

    module = lower(kernel, (x, y, 1024), {"BLOCK": 128, "num_warps": 8}, arch="sm_90")

The arguments are bound and specialised by the code that a real launch uses (dtype, alignment by
16, equal to 1), so the IR is the one that a launch would compile. Nothing is written to a cache.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from triton.backends.compiler import GPUTarget

STAGES = ("ttir", "ttgir")


def gpu_target(arch: str) -> GPUTarget:
    """`sm_90` or `gfx942`, as Triton names it."""
    from triton.backends.compiler import GPUTarget

    if match := re.fullmatch(r"sm_?(\d+)a?", arch):
        return GPUTarget("cuda", int(match[1]), 32)
    if re.fullmatch(r"gfx[0-9a-f]+", arch):
        # CDNA (gfx9..) has wavefronts of 64 lanes, RDNA (gfx10 and later) of 32.
        return GPUTarget("hip", arch, 64 if arch.startswith("gfx9") else 32)
    raise ValueError(f"unknown architecture {arch!r}: give an NVIDIA sm_NN or an AMD gfxNNN name")


def lower(
    kernel: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    arch: str = "sm_90",
    stage: str = "ttgir",
) -> Any:
    """Return the module that a launch `kernel[grid](*args, **kwargs)` on `arch` would compile.

    `kwargs` are what a launch takes: arguments by name, constexprs, num_warps and other options.
    Tensors may be on any device, `meta` included.
    """
    source, options = source_of(kernel, args, kwargs, arch=arch)
    return lower_source(source, options, arch=arch, stage=stage)


def source_of(
    kernel: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None, *, arch: str
) -> tuple[Any, dict[str, Any]]:
    """Return what a launch hands to Triton's compiler: its ASTSource, and all options."""
    from triton.compiler.compiler import make_backend
    from triton.runtime.jit import create_function_from_signature

    kernel = _jit_function(kernel)
    backend = make_backend(gpu_target(arch))
    launch = dict(kwargs or {}) | _launch_knobs(kernel, kwargs or {})
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, specialization, options = bind(*args, **launch)
    options, signature, constexprs, attrs = kernel._pack_args(
        backend, launch, bound, specialization, options
    )
    return _source_class(kernel)(kernel, signature, constexprs, attrs), options.__dict__


def lower_source(
    source: Any, options: Mapping[str, Any], *, arch: str = "sm_90", stage: str = "ttgir"
) -> Any:
    """Do the same from an explicit `triton.compiler.ASTSource`: signature, constexprs, attrs."""
    if stage not in STAGES:
        raise ValueError(f"stage is {stage!r}: give one of {', '.join(STAGES)}")
    for name, module in lower_stages(source, options, arch=arch):
        if name == stage:
            return module
    raise ValueError(f"a Gluon kernel has no {stage}: ask for ttgir")


def lower_stages(
    source: Any, options: Mapping[str, Any], *, arch: str = "sm_90"
) -> Iterator[tuple[str, Any]]:
    """Yield name and module of each of STAGES. The next one changes the module of the one before.

    Gluon has no ttir; what Triton 3.9 has before its ttgir is not yielded.
    """
    from triton.compiler.compiler import make_backend

    target = gpu_target(arch)
    backend = make_backend(target)
    parsed = backend.parse_options({**options, **source.parse_options()})
    context = _context(backend)
    implementation = backend.get_codegen_implementation(parsed)
    module = source.make_ir(target, parsed, implementation, backend.get_module_map(), context)
    stages: dict[str, Any] = {}
    backend.add_stages(stages, parsed, source.language)
    names = list(stages)
    metadata = {"target": target, **parsed.__dict__}
    for name in names[names.index(source.ext) : names.index(STAGES[-1]) + 1]:
        module = stages[name](module, metadata)
        module.context = context
        if name in STAGES:
            yield name, module


def _launch_knobs(kernel: Any, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return what `JITFunction.run` adds to the options of a launch from Triton's settings."""
    from triton import knobs

    added: dict[str, Any] = {}
    added["debug"] = bool(kwargs.get("debug", kernel.debug) or knobs.runtime.debug)
    for name in ("instrumentation_mode", "fpsan_homomorphic_casts"):  # the latter since 3.9
        if hasattr(knobs.compilation, name):
            added[name] = getattr(knobs.compilation, name)
    return added


def _context(backend: Any) -> Any:
    from triton._C.libtriton import ir

    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    return context


def _jit_function(kernel: Any) -> Any:
    """Below `@triton.autotune` and `@triton.heuristics`, whose choices the caller gives."""
    from triton.runtime.jit import JITFunction

    inner = kernel
    while not isinstance(inner, JITFunction):
        if not hasattr(inner, "fn"):
            raise ValueError(f"{kernel!r} is not a @triton.jit kernel")
        inner = inner.fn
    return inner


def _source_class(kernel: Any) -> Any:
    if kernel.is_gluon():
        from triton.experimental.gluon._runtime import GluonASTSource

        return GluonASTSource
    from triton.compiler import ASTSource

    return ASTSource
