"""Read litmus tests written in PTX or Vulkan into `memory_model.litmus` programs.

A test has a header, initial values in braces, a table with one column per thread and a condition
on how it ends. The grammar is that of the files; the code is ours. The instructions are read by
`ptx_words` and `vulkan_words`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from ..memory_model.executions import Ending
from ..memory_model.litmus import Instruction, Litmus, Set, Thread
from .ptx_words import ptx_instruction, ptx_place
from .vulkan_words import Vulkan


@dataclass(frozen=True)
class Question:
    """A program and the question asked of it."""

    litmus: Litmus
    asks: str  # "exists", "~exists" or "forall"; nothing if only races are asked for
    holds: Callable[[Ending], bool]
    keep: Callable[[Ending], bool]  # the endings that count

    def passes(self, outcomes: Iterable[Ending]) -> bool:
        """Say whether the condition is met by the outcomes that the model allows."""
        outcomes = filter(self.keep, outcomes)
        if self.asks == "forall":
            return all(self.holds(outcome) for outcome in outcomes)
        return any(self.holds(outcome) for outcome in outcomes) == (self.asks == "exists")


def read_litmus(text: str) -> Question:
    """Parse one test; ValueError says what cannot be read or expressed."""
    text = re.sub(r'"[^"]*"', "", text)
    head, rest = text.split("{", 1)
    language = head.split()[0].upper()
    if language not in ("PTX", "VULKAN"):
        raise ValueError(f"{language!r} is not a language read here")
    start, body = rest.split("}", 1)
    start, body = _one_name(start, body)
    if "ssw" in body:
        raise ValueError("order between submissions (ssw) is outside one kernel")
    kept, body = _question(body, "filter")
    asked, body = _question(body, r"~\s*exists|exists|forall")
    rows = [row.split("|") for row in body.split(";") if row.strip()]
    initial, registers, aliases, views = _initial(start)
    columns = [
        [row[i].strip() for row in rows[1:] if len(row) > i and row[i].strip()]
        for i in range(len(rows[0]))
    ]
    if language == "PTX":
        places, instruction = [ptx_place(text) for text in rows[0]], ptx_instruction
    else:
        vulkan = Vulkan(rows[0], columns)
        places, instruction = vulkan.places, vulkan.instruction
    sets = [[Set(k, v) for k, v in registers.get(t, {}).items()] for t in range(len(places))]
    codes = [tuple(_code(c, s, instruction)) for c, s in zip(columns, sets, strict=True)]
    threads = tuple(Thread(code, place) for code, place in zip(codes, places, strict=True))
    litmus = Litmus(threads, initial, aliases, views)
    keep = _condition(kept[1], litmus) if kept else lambda ending: True
    holds = _condition(asked[1], litmus) if asked else lambda ending: True
    return Question(litmus, asked[0].replace(" ", "") if asked else "", holds, keep)


def _one_name(start: str, body: str) -> tuple[str, str]:
    """Give a place with two names (in Vulkan, of two storage classes) the first of them."""
    left = []
    for item in start.split(";"):
        if match := re.fullmatch(r"\s*(\w+)\s+aliases\s+(\w+)\s*", item):
            body = re.sub(rf"\b{match[1]}\b", match[2], body)
        else:
            left.append(item)
    return ";".join(left), body


def _question(text: str, words: str) -> tuple[tuple[str, str] | None, str]:
    """Cut a question off the end of the text, or the filter before it."""
    match = re.search(rf"\b({words})\b|(~\s*exists)\b", text)
    if match is None:
        return None, text
    rest = text[match.end() :]
    end = re.search(r"\b(exists|forall|filter)\b", rest) if words == "filter" else None
    cut = len(rest) if end is None else end.start()
    return (match[0], rest[:cut]), text[: match.start()] + rest[cut:]


def _initial(text: str) -> tuple[dict, dict, dict, dict]:
    memory: dict[str, int] = {}
    registers: dict[int, dict[str, int]] = {}
    aliases: dict[str, str] = {}
    views: dict[str, str] = {}
    for item in filter(None, (part.strip() for part in text.split(";"))):
        if match := re.fullmatch(r"(\w+)\s*@\s*(\w+)\s+aliases\s+(\w+)", item):
            name, proxy, target = match.groups()
            (aliases if proxy == "generic" else views)[name] = target
        elif match := re.fullmatch(r"P?(\d+)\s*:\s*(r\d+)\s*=\s*(-?\d+)", item):
            registers.setdefault(int(match[1]), {})[match[2]] = int(match[3])
        elif match := re.fullmatch(r"(\w+)\s*=\s*(-?\d+)", item):
            memory[match[1]] = int(match[2])
        else:
            raise ValueError(f"{item!r}: not an initial value that is read here")
    return memory, registers, aliases, views


def _code(
    column: list[str], sets: list[Set], instruction: Callable[[str, dict[str, int]], Instruction]
) -> Iterator[Instruction]:
    labels: dict[str, int] = {}
    lines: list[str] = []
    for line in column:
        if line.endswith(":"):
            labels[line[:-1].strip()] = len(sets) + len(lines)
        else:
            lines.append(line)
    yield from sets
    for line in lines:
        yield instruction(line, labels)


# conditions


def _condition(text: str, program: Litmus) -> Callable[[Ending], bool]:
    """Make a predicate: comparisons with `/\\`, `\\/`, `~` and parentheses."""
    tokens = re.findall(r"/\\|\\/|==|!=|<=|>=|[=<>~()]|P?\d+\s*:\s*r\d+|\w+", text)
    found = _either(tokens, program)
    if tokens:
        raise ValueError(f"{' '.join(tokens)!r}: cannot read this part of the condition")
    return found


def _either(tokens: list[str], program: Litmus) -> Callable[[Ending], bool]:
    terms = [_both(tokens, program)]
    while tokens[:1] == ["\\/"]:
        tokens.pop(0)
        terms.append(_both(tokens, program))
    return lambda outcome: any(term(outcome) for term in terms)


def _both(tokens: list[str], program: Litmus) -> Callable[[Ending], bool]:
    terms = [_term(tokens, program)]
    while tokens[:1] == ["/\\"]:
        tokens.pop(0)
        terms.append(_term(tokens, program))
    return lambda outcome: all(term(outcome) for term in terms)


def _term(tokens: list[str], program: Litmus) -> Callable[[Ending], bool]:
    token = tokens.pop(0)
    if token == "~":
        inner = _term(tokens, program)
        return lambda outcome: not inner(outcome)
    if token == "(":
        inner = _either(tokens, program)
        tokens.pop(0)
        return inner
    left, op, right = _values(token, program), tokens.pop(0), _values(tokens.pop(0), program)
    same = op in ("=", "==")
    if not same and op != "!=":
        raise ValueError(f"{op!r}: not a comparison that is read here")
    return lambda outcome: any((a == b) == same for a in left(outcome) for b in right(outcome))


def _values(token: str, program: Litmus) -> Callable[[Ending], set[int]]:
    """Return the values that a token may have in an outcome; there may be several."""
    if match := re.fullmatch(r"P?(\d+)\s*:\s*(r\d+)", token):
        thread, register = int(match[1]), match[2]
        return lambda outcome: {outcome.registers[thread].get(register, 0)}
    if token.isdecimal():
        return lambda outcome: {int(token)}
    place = program.physical(token)
    start = program.initial.get(place, 0)
    return lambda outcome: outcome.memory.get(place, {start})
