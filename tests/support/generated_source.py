"""A generated `Case` as a Python file: kernels and a rank's function, one operation per line."""

from __future__ import annotations

from dataclasses import dataclass, field

from .generated_cases import LOCAL, WORDS, Case, HostOp, Op

__all__ = ["FIRST", "POLLS", "Site", "Text", "source"]

FIRST = 1000  # line of the first kernel: the trace has no file names, and sundog's are shorter
POLLS = 4
Site = tuple[int, int, int]  # rank, launch of that rank (-1: host), program


@dataclass
class Text:
    """The source of a case, and what stands on which line."""

    lines: list[str] = field(default_factory=list)
    ops: dict[int, tuple[Site, Op | HostOp]] = field(default_factory=dict)

    def add(self, text: str, site: Site | None = None, op: Op | HostOp | None = None) -> None:
        self.lines.append(text)
        if site is not None and op is not None:
            self.ops[len(self.lines)] = site, op


def source(case: Case) -> Text:
    text = Text(["import torch", "import triton", "import triton.language as tl"])
    text.lines += [""] * (FIRST - 1 - len(text.lines))
    for number, ranks in enumerate(case.phases):
        for rank, phase in enumerate(ranks):
            launch = sum(bool(earlier[rank].programs) for earlier in case.phases[:number])
            if phase.programs:
                _add_kernel(text, case, f"kernel_{number}_{rank}", (rank, launch), phase.programs)
    _add_main(text, case)
    return text


def _add_kernel(
    text: Text, case: Case, name: str, launch: tuple[int, int], programs: tuple[tuple[Op, ...], ...]
) -> None:
    pointers = ", ".join(f"m{rank}" for rank in range(case.world_size))
    text.add("@triton.jit")
    text.add(f"def {name}({pointers}, local):")
    for number, body in enumerate(programs):
        text.add(f"    if tl.program_id(0) == {number}:")
        for op in body:
            _add_op(text, (*launch, number), op)
    text.add("")


def _add_op(text: Text, site: Site, op: Op) -> None:
    if op.kind != "wait":
        text.add(f"        {_call(op)}", site, op)
        return
    text.add("        seen, polls = tl.full((), 0, tl.int32), 0")
    text.add(f"        while (seen == 0) & (polls < {POLLS}):")
    text.add(f"            seen = {f'tl.min({_call(op)}, 0)' if op.lanes else _call(op)}", site, op)
    text.add("            polls += 1")


def _call(op: Op) -> str:
    """The operation as one expression of a kernel."""
    if op.kind == "barrier":
        return "tl.debug_barrier()"
    at = f"{'local' if op.owner == LOCAL else f'm{op.owner}'} + {op.word}"
    if op.byte >= 0:
        at = f"({at}).to(tl.pointer_type(tl.int8), bitcast=True) + {op.byte}"
    lanes = f"tl.arange(0, {op.lanes})"
    at += f" + {lanes}" if op.lanes else ""
    mask = f", mask={lanes} < {op.lanes - 1}" if op.masked and op.lanes else ""
    order = f', sem="{op.sem}", scope="{op.scope}"'
    if op.kind == "store":
        return f"tl.store({at}, 3{mask})"
    if op.name == "":
        return f"tl.load({at}{mask}{', volatile=True' if op.kind == 'wait' else ''})"
    if op.name == "cas":
        shape = f"({op.lanes},)" if op.lanes else "()"
        return f"tl.atomic_cas({at}, tl.full({shape}, 0, tl.int32), 1{order})"
    return f"tl.atomic_{op.name}({at}, {int(op.kind != 'wait')}{mask}{order})"


def _add_main(text: Text, case: Case) -> None:
    text.add("def main(world):")
    text.add(f"    symmetric = world.zeros(({WORDS},), torch.int32)")
    text.add(f"    local = torch.zeros({WORDS}, dtype=torch.int32)")
    text.add("    world.barrier()")
    text.add("    memory = [world.peer(symmetric, rank) for rank in range(world.size)]")
    for number, ranks in enumerate(case.phases):
        for rank, phase in enumerate(ranks):
            text.add(f"    if world.rank == {rank}:")
            text.add("        pass")
            for op in phase.before:
                text.add(f"        {_host_call(op)}", (rank, -1, -1), op)
            if phase.programs:
                grid = len(phase.programs)
                text.add(f"        kernel_{number}_{rank}[({grid},)](*memory, local)")
            for op in phase.after:
                text.add(f"        {_host_call(op)}", (rank, -1, -1), op)
        if case.barriers[number]:
            text.add("    world.barrier()")
    text.add("    return local")


def _host_call(op: HostOp) -> str:
    base = "local" if op.owner == LOCAL else f"memory[{op.owner}]"
    words = f"{base}[{op.word}:{op.word + op.count}]"
    verb = {"read": "clone()", "write": "fill_(5)", "copy": "copy_(memory[world.rank][7:8])"}
    return f"{words}.{verb[op.kind]}"
