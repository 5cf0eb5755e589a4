"""Read a small C program into statements with their lines: what RMARaceBench's programs use.

An expression is a nested tuple: ("call", function, arguments), ("name", "x"), ("number", 1),
("unary", "&", expression), ("binary", "==", left, right), ("index", base, place), ("text", "...").
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

TOKENS = re.compile(
    r'"(?:\\.|[^"\\])*"|\d+\.\d+|\d+\w*|\w+|\+\+|--|[=!<>]=|&&|\|\||\+=|[-+*/%<>=!&(){}\[\];,.]'
)
TYPES = (
    "int",
    "long",
    "double",
    "float",
    "uint64_t",
    "void",
    "char",
    "shmem_ctx_t",
    "shmem_team_t",
)
BINARY = (("==", "!="), ("<", ">", "<=", ">="), ("+", "-"), ("*", "/", "%"))


@dataclass(frozen=True)
class Statement:
    """One statement. `kind` says what the rest means."""

    kind: str  # block, if, for, while, pragma, declare, expression, assign or return
    line: int
    parts: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Function:
    parameters: tuple[str, ...]
    body: Statement


@dataclass
class _Reader:
    tokens: list[tuple[str, int]]
    at: int = 0
    functions: dict[str, Function] = field(default_factory=dict)

    def peek(self, ahead: int = 0) -> str:
        return self.tokens[self.at + ahead][0] if self.at + ahead < len(self.tokens) else ""

    def take(self, wanted: str = "") -> str:
        token, line = self.tokens[self.at]
        if wanted and token != wanted:
            raise ValueError(f"line {line}: {wanted!r} expected, {token!r} found")
        self.at += 1
        return token

    @property
    def line(self) -> int:
        return self.tokens[min(self.at, len(self.tokens) - 1)][1]


def read_program(text: str, constants: dict[str, int]) -> dict[str, Function]:
    """Return the functions of a program; ValueError names a line that cannot be read."""
    reader = _Reader(list(_tokens(text, constants)))
    while reader.peek():
        _function(reader)
    return reader.functions


def _tokens(text: str, constants: dict[str, int]) -> Any:
    blank = re.sub(r"/\*.*?\*/", lambda found: "\n" * found[0].count("\n"), text, flags=re.S)
    for number, line in enumerate(blank.splitlines(), 1):
        if line.startswith("#define"):
            _, name, value = line.split()
            constants[name] = int(value)
        elif line.startswith("#pragma"):
            yield line, number
        elif not line.startswith("#"):
            for token in TOKENS.findall(re.sub(r"//.*", "", line)):
                yield token, number


def _function(reader: _Reader) -> None:
    if reader.peek() == "__attribute__":
        reader.at += len(["__attribute__", "(", "(", "noinline", ")", ")"])
    name, names = _declared(reader), []
    reader.take("(")
    while reader.peek() != ")":
        names.append(_declared(reader))
        if reader.peek() == ",":
            reader.take()
    reader.take(")")
    reader.functions[name] = Function(tuple(names), _statement(reader))


def _declared(reader: _Reader) -> str:
    """Read a type and return the name that it is given to."""
    while reader.peek() in (*TYPES, "static", "*"):
        reader.take()
    return reader.take()


def _statement(reader: _Reader) -> Statement:
    line, token = reader.line, reader.peek()
    if token.startswith("#pragma"):
        words = reader.take().replace("(", " ( ").split()[2:]
        alone = words[0] in ("barrier", "taskwait")
        return Statement("pragma", line, (words, None if alone else _statement(reader)))
    if token == "{":
        return _block(reader)
    if token in ("if", "while", "for", "do"):
        return {"if": _if, "while": _while, "for": _for, "do": _do}[token](reader)
    if token == "return":
        reader.take()
        found = _expression(reader)
        reader.take(";")
        return Statement("return", line, (found,))
    if token == "continue":
        reader.take()
        reader.take(";")
        return Statement("block", line)
    return _simple(reader, ";")


def _block(reader: _Reader) -> Statement:
    line = reader.line
    reader.take("{")
    parts = []
    while reader.peek() != "}":
        parts.append(_statement(reader))
    reader.take("}")
    return Statement("block", line, tuple(parts))


def _if(reader: _Reader) -> Statement:
    line = reader.line
    reader.take("if")
    condition, then, other = _bracketed(reader), _statement(reader), None
    if reader.peek() == "else":
        reader.take()
        other = _statement(reader)
    return Statement("if", line, (condition, then, other))


def _while(reader: _Reader) -> Statement:
    line = reader.line
    reader.take("while")
    return Statement("while", line, (_bracketed(reader), _statement(reader)))


def _do(reader: _Reader) -> Statement:
    line = reader.line
    reader.take("do")
    body = _statement(reader)
    reader.take("while")
    condition = _bracketed(reader)
    reader.take(";")
    return Statement("while", line, (condition, body))


def _for(reader: _Reader) -> Statement:
    """Read a loop from 0 by ones."""
    line = reader.line
    reader.take("for")
    reader.take("(")
    start = _simple(reader, ";")
    condition = _expression(reader)
    reader.take(";")
    while reader.take() != ")":
        pass
    name = start.parts[0][0][0]
    return Statement("for", line, (name, condition[3], _statement(reader)))


def _bracketed(reader: _Reader) -> Any:
    reader.take("(")
    found = _expression(reader)
    reader.take(")")
    return found


def _simple(reader: _Reader, end: str) -> Statement:
    """Read a declaration, an assignment or an expression."""
    line = reader.line
    if reader.peek() in (*TYPES, "static"):
        return _declaration(reader, end)
    left = _expression(reader)
    if reader.peek() == "=":
        reader.take()
        found = Statement("assign", line, (left, _expression(reader)))
    else:
        found = Statement("expression", line, (left,))
    reader.take(end)
    return found


def _declaration(reader: _Reader, end: str) -> Statement:
    line, kind = reader.line, reader.peek(reader.peek() == "static")
    is_static, names = reader.peek() == "static", []
    while True:
        is_pointer = reader.peek(1) == "*" or reader.peek(2) == "*"
        name = _declared(reader)
        if name == "(":  # a pointer to a function
            reader.take("*")
            name, is_pointer = reader.take(), True
            while reader.peek() != end:
                reader.take()
        size, value = ("number", 1), None
        if reader.peek() == "[":
            reader.take()
            size = _expression(reader)
            reader.take("]")
        if reader.peek() == "=":
            reader.take()
            value = _expression(reader)
        names.append((name, value, size, is_pointer))
        if reader.take() == end:
            return Statement("declare", line, (names, kind, is_static))


def _expression(reader: _Reader, level: int = 0) -> Any:
    """Read operators from those that bind least to those that bind most."""
    if level == len(BINARY):
        return _unary(reader)
    left = _expression(reader, level + 1)
    while reader.peek() in BINARY[level]:
        operator = reader.take()
        left = ("binary", operator, left, _expression(reader, level + 1))
    return left


def _unary(reader: _Reader) -> Any:
    token = reader.peek()
    if token in ("&", "*", "-"):
        reader.take()
        return ("unary", token, _unary(reader))
    if token == "(" and reader.peek(1) in TYPES:  # a cast
        while reader.take() != ")":
            pass
        return _unary(reader)
    return _postfix(reader)


def _postfix(reader: _Reader) -> Any:
    if reader.peek() == "(":
        found = _bracketed(reader)
    else:
        found = _atom(reader.take())
    while reader.peek() in ("(", "[", "++"):
        token = reader.take()
        if token == "(":
            found = ("call", found, _arguments(reader))
        elif token == "[":
            found = ("index", found, _expression(reader))
            reader.take("]")
        else:
            found = ("grow", found)
    return found


def _arguments(reader: _Reader) -> list[Any]:
    found = []
    while reader.peek() != ")":
        if reader.peek() in TYPES:  # of sizeof
            found.append(("text", _type(reader)))
        else:
            found.append(_expression(reader))
        if reader.peek() == ",":
            reader.take()
    reader.take(")")
    return found


def _type(reader: _Reader) -> str:
    words = []
    while reader.peek() in (*TYPES, "*"):
        words.append(reader.take())
    return " ".join(words)


def _atom(token: str) -> Any:
    if token.startswith('"'):
        return ("text", token)
    if token[0].isdigit():
        return ("number", int(float(re.match(r"[\d.]+", token)[0])))  # type: ignore[index]
    return ("name", token)
