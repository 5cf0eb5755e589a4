"""Walk a program in C as one thread of one process; write what it does as lines of a kernel.

Which statements run is known beforehand: conditions ask for the process, a team or a loop's index.
A pointer is followed while walking, so that a line names the variable itself.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from .c_programs import Function, Statement
from .omp_pragmas import PRAGMAS
from .places import Place, Slots, Variable
from .shmem_words import shmem_call

INVALID = "no team"
CONSTANTS = {"SHMEM_TEAM_INVALID": INVALID, "SHMEM_TEAM_WORLD": (0, 1, 0), "NULL": 0,
             "SHMEM_TEAM_SHARED": (0, 1, 0), "SHMEM_SIGNAL_SET": 9, "SHMEM_SIGNAL_ADD": 10,
             "SHMEM_CMP_EQ": 0}  # fmt: skip
WIDTHS = {"int": 4, "float": 4}


@dataclass
class Walker:
    """One thread. The first runs what is serial; both walk all of it, to agree on the rest."""

    process: int
    size: int
    thread: int
    functions: dict[str, Function]
    constants: dict[str, Any]
    slots: Slots
    lines: list[tuple[int, str]] = field(default_factory=list)
    scopes: list[dict[str, Variable]] = field(default_factory=list)
    is_active: bool = True
    in_parallel: bool = False
    visits: Counter[tuple] = field(default_factory=Counter)
    contexts: int = 0
    returned: Any = None
    task: Place | None = None  # the word that says that the latest task is done

    def run(self) -> list[tuple[int, str]]:
        self.is_active = self.thread == 0
        self.call("main", [])
        return self.lines

    def emit(self, line: int, text: str) -> None:
        if self.is_active:
            self.lines.append((line, text))

    def call(self, name: str, values: list[Any]) -> Any:
        """Walk a function; pointers and numbers are known, so that it is as if inlined."""
        function, outside = self.functions[name], self.scopes
        pairs = zip(function.parameters, values, strict=False)
        self.scopes = [{n: Variable(Place(""), value, True) for n, value in pairs}]
        self.returned = None
        self.walk(function.body)
        self.scopes = outside
        return self.returned

    # statements

    def walk(self, statement: Statement) -> None:
        getattr(self, f"_{statement.kind}")(statement.line, *statement.parts)

    def _block(self, line: int, *parts: Statement) -> None:
        self.scopes.append({})
        for part in parts:
            self.walk(part)
        self.scopes.pop()

    def _if(self, line: int, condition: Any, then: Statement, other: Statement | None) -> None:
        if self.value(line, condition):
            self.walk(then)
        elif other is not None:
            self.walk(other)

    def _for(self, line: int, name: str, end: Any, body: Statement) -> None:
        for number in range(self.value(line, end)):
            self.iterate(name, number, body)

    def iterate(self, name: str, number: int, body: Statement) -> None:
        self.scopes.append({name: Variable(Place(""), number)})
        self.walk(body)
        self.scopes.pop()

    def _while(self, line: int, condition: Any, body: Statement) -> None:
        """Write a loop that polls: its body does nothing but read."""
        self.walk(body)
        _, sign, left, right = condition
        text = f"while {self._polled(left)} {sign} {self.value(line, right)}:"
        self.emit(line, f"{text}\n    pass")

    def _polled(self, left: Any) -> str:
        if left[0] == "call":
            return f"signal_fetch({self.place(left[2][0][2])})"
        variable = self.find(left[1])
        if isinstance(variable.value, Place):  # read by an OpenMP atomic
            return f'tl.atomic_add({variable.value}, 0, sem="relaxed", scope="gpu")'
        return f"tl.load({variable.place})"

    def _declare(self, line: int, names: list[tuple], kind: str, is_static: bool) -> None:
        for name, start, size, is_pointer in names:
            own = f"_{self.thread}" if self.in_parallel else ""
            slot = self.slots.named(f"{name}_{line}{own}", self.value(line, size))
            is_handle = is_pointer or kind.startswith("shmem")
            variable = Variable(Place(slot, 0, WIDTHS.get(kind, 8)), None, is_handle)
            if start is not None and (is_handle or name in ("my_pe", "num_pe")):
                variable.value = self.value(line, start)
            elif start is not None and not is_static:
                self.emit(line, f"tl.store({variable.place}, {self.value(line, start)})")
            self.scopes[-1][name] = variable

    def _expression(self, line: int, expression: Any) -> None:
        self.value(line, expression)

    def _return(self, line: int, expression: Any) -> None:
        self.returned = self.value(line, expression)

    def _assign(self, line: int, left: Any, right: Any) -> None:
        target = self._target(left)
        if isinstance(target, Variable):
            target.value = self.value(line, right)
            return
        if right[0] == "call" and str(right[1][1]).startswith("shmem_"):
            values = [self.value(line, each) for each in right[2]]
            self.emit(line, shmem_call(self, line, right[1][1], values, into=target))
            return
        value = self.value(line, right)
        self.emit(line, f"tl.store({target}, {0 if value is None else value})")

    def _target(self, left: Any) -> Variable | Place:
        """Return what is assigned to: a place in memory, or a pointer that is known."""
        if left[0] == "name":
            variable = self.find(left[1])
            return variable if variable.is_handle else variable.place
        return self.value(0, left[2]) if left[0] == "unary" else self.place(left)

    def _pragma(self, line: int, words: list[str], body: Statement | None) -> None:
        PRAGMAS[words[0]](self, line, words[1:], body)

    # expressions

    def find(self, name: str) -> Variable:
        for scope in reversed(self.scopes):
            if name in scope:
                return scope[name]
        raise ValueError(f"{name}: not a variable that is known here")

    def place(self, expression: Any) -> Place:
        """Return where a variable, an element or what a pointer points at is."""
        if expression[0] == "name":
            return self.find(expression[1]).place
        if expression[0] == "index":
            base = self.place(expression[1])
            return Place(base.slot, self.value(0, expression[2]), base.width)
        return self.value(0, expression[2])

    def value(self, line: int, expression: Any) -> Any:
        """Return a value that is known; read memory where it is not, and return None."""
        kind = expression[0]
        if kind in ("number", "text"):
            return expression[1]
        return getattr(self, f"_of_{kind}")(line, *expression[1:])

    def _of_name(self, line: int, name: str) -> Any:
        if name in self.functions:
            return name
        if name in CONSTANTS or name in self.constants:
            return {**CONSTANTS, **self.constants}[name]
        variable = self.find(name)
        if variable.value is None:
            self.emit(line, f"tl.load({variable.place})")
        return variable.value

    def _of_unary(self, line: int, sign: str, inner: Any) -> Any:
        if sign == "&":
            if inner[0] != "name":
                return self.place(inner)
            variable = self.find(inner[1])
            return variable if variable.is_handle else variable.place
        found = self.value(line, inner)
        if sign == "-":
            return -found
        if isinstance(found, Place):
            self.emit(line, f"tl.load({found})")
            return None
        return found.value if isinstance(found, Variable) else found

    def _of_index(self, line: int, base: Any, index: Any) -> None:
        self.emit(line, f"tl.load({self.place(('index', base, index))})")

    def _of_binary(self, line: int, sign: str, left: Any, right: Any) -> Any:
        a, b = self.value(line, left), self.value(line, right)
        if a is None or b is None:
            return None
        signs = {"==": a == b, "!=": a != b}
        if sign in signs:
            return signs[sign]
        return {"<": a < b, "+": a + b, "-": a - b, "*": a * b, "/": a // b if b else 0}[sign]

    def _of_call(self, line: int, target: Any, arguments: list[Any]) -> Any:
        name = self.value(line, target) if target[0] == "unary" else target[1]
        if name in self.functions:
            return self.call(name, [self.value(line, each) for each in arguments])
        if name == "memcpy":
            to, source, _ = (self.value(line, each) for each in arguments)
            to.value = source.value
        elif name == "printf":
            for each in arguments:
                self.value(line, each)
        elif name in ("shmem_my_pe", "shmem_n_pes"):
            return self.process if name == "shmem_my_pe" else self.size
        elif name == "shmem_team_translate_pe":
            return self.value(line, arguments[1])
        elif name.startswith("shmem_"):
            values = [self.value(line, each) for each in arguments]
            self.emit(line, shmem_call(self, line, name, values))
        elif name not in ("sizeof", "sleep", "usleep"):
            raise ValueError(f"line {line}: {name} is not known")
        return None
