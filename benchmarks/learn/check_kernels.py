"""Run each kernel on a tiny shape in Triton's interpreter and compare it with its reference.

The interpreter must be on before a kernel is defined: `TRITON_INTERPRET=1 python -m
benchmarks.learn check` (it is slow, so shapes are tiny; float32, since it gets bfloat16 wrong).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from .kernels import SUBJECTS
from .subject import Args, Subject, Task

_CONFIGS = 1  # of each kernel


def check(names: list[str]) -> int:
    """Print a line per kernel; return how many are wrong."""
    wrong = 0
    for name in names or SUBJECTS:
        errors = list(_errors(SUBJECTS[name]))
        bad = [error for error in errors if not error < 1e-3 + SUBJECTS[name].loses]
        wrong += bool(bad)
        print(f"{name:24} {'WRONG' if bad else 'right'} {max(errors):.1e}", flush=True)
    return wrong


def _errors(subject: Subject) -> Iterator[float]:
    task = Task(subject, subject.tiny, "float32")
    torch.manual_seed(0)
    args = task.make("cpu")
    wanted = subject.reference({**args, **subject.constants(task.shape)})
    for config in subject.configs[:_CONFIGS]:
        wipe(subject, args)
        given = {**args, **task.launch_fields(config), **task.compile_fields(config)}
        subject.kernel[task.grid(config)](**given)
        yield relative_error(subject.results(args), wanted)


def wipe(subject: Subject, args: Args) -> None:
    """Fill outputs with what no right result has, or with zero where the kernel adds."""
    for name in subject.outputs:
        out = args[name]
        if subject.adds:
            out.zero_()
        elif out.dtype.is_floating_point and out.dtype.itemsize > 1:
            out.fill_(float("nan"))
        else:
            out.view(torch.int8).fill_(0x7F)  # a NaN of float8


def relative_error(found: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> float:
    """Return the largest norm of a difference by that of what is wanted; NaN passes no test."""
    errors = []
    for got, want in zip(found, wanted, strict=True):
        difference = torch.linalg.vector_norm(got.float() - want.float())
        errors.append(difference / torch.linalg.vector_norm(want.float()).clamp(min=1e-20))
    return float(torch.stack(errors).max())
