"""Keep the worst phrases out of docs, docstrings, comments and messages.

    python scripts/prose.py             # fail if a file in scope has one; `make lint` runs this
    python scripts/prose.py --count     # a table of matches per folder, of all files

Each phrase comes with what to write instead. Names of things are not looked at: in Python only
comments and strings are. In the package a function's docstring must also begin with a verb; ruff's
D401 finds most that do not, and this check the rest.
"""

from __future__ import annotations

import ast
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent

PHRASES = {
    r"by lot": "at random",
    r"(?<!left )(?<!leave )(?<!leaves )(?<!queued )behind(?! (?:a |the |this )?(?:\w+ )?link)": (
        "after, or following"
    ),
    r"(?:the|an) own": "its own, or local",
    r"told(?! apart| from)": "reported, or raises; or name what does it",
    r"of before": "previous, or earlier",
    r"of then": "name the time",
    r"so many": "a number",
    r"(?:come|comes|came) to pass": "completed",
    r"in turns": "interleaved",
    r"(?:come|comes|came) to a place": "lands",
    r"rightly": "correctly",
    r"fits? not": "does not fit",
    r"whoever": "name the reader",
    r"(?:what|something) (?:becomes|became|came) of": "say what happened",
    r"he has|of his own": "name the caller",
    r"(?:is|are) no (?:op|name|module|function|power|multiples?|class|register|world)": "is not a",
    r"for so \w+ a": "for this size",
    r"(?<=[a-z)`]\. )of (?:an?|the|each|every|few|many|several|two|single|such|what|all|its)": (
        "the subject first; then for, in or among"
    ),
}
_PATTERN = re.compile("|".join(rf"(\b(?:{each})\b)" for each in PHRASES), re.I)
# What a function's docstring must not begin with.
_OPENING = re.compile(
    r"(?:Whether|What|Which|Why|Who|How|Where|When|Is|Are|Was|Does|Has|Have|Can|Could|Would|Did|The"
    r"|An?|Every|Each|All|This|Its|Those|No|Another|Any|Two|Both|Some|Of|As|In|From|By|For|Without"
    r"|After|Like|On|With|At|To|Between|Before|Until|Nothing|Nobody|None|True|False|It|ValueError"
    r"|Rows|Bytes|Words|Elements|Tiles|Programs|Memory|Seconds)\b"
)
_NAME = re.compile(r"[\"'{`]\w+[\"'}`]")  # a word in quotes or braces is a name, not prose

IN_SCOPE = (
    "README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs", "tutorials", "examples", "benchmarks",
    "data", "scripts", "sundog", "tests",
)  # fmt: skip
GENERATED = ("docs/measured.md",)  # made by a program, which has its own scope

_IGNORED = ("scripts/prose.py", "tests/test_prose.py")  # they quote the phrases


def main(words: list[str]) -> int:
    if words == ["--count"]:
        print(table())
        return 0
    found = [line for path in files(IN_SCOPE) for line in matches(path)]
    found += [line for path in files(("sundog",)) for line in openings(path)]
    print("\n".join(found) or "prose: nothing to report")
    return 1 if found else 0


def files(scope: tuple[str, ...]) -> list[Path]:
    """Return the pages and Python files in these files and folders."""
    found: list[Path] = []
    for name in scope:
        path = ROOT / name
        inside = [path] if path.is_file() else sorted(path.rglob("*"))
        found += [each for each in inside if each.suffix in (".md", ".py")]
    skipped = {ROOT / name for name in (*GENERATED, *_IGNORED)}
    return [path for path in found if path not in skipped]


def matches(path: Path) -> Iterator[str]:
    """Yield a line for every phrase in a file: where it is, and what to write instead."""
    advice = list(PHRASES.values())
    for line, text in _texts(path):
        for match in _PATTERN.finditer(text):
            if _NAME.fullmatch(text[max(match.start() - 1, 0) : match.end() + 1]):
                continue
            number = line + text.count("\n", 0, match.start())
            instead = advice[(match.lastindex or 1) - 1]
            yield f"{path.relative_to(ROOT)}:{number}: {match[0]!r}: write {instead}"


def openings(path: Path) -> Iterator[str]:
    """Yield a line for every docstring of a function that does not begin with a verb."""
    tree = ast.parse(path.read_text()) if path.suffix == ".py" else ast.Module([], [])
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef) or any(map(_is_property, node.decorator_list)):
            continue
        if first := _OPENING.match(ast.get_docstring(node) or ""):
            where = f"{path.relative_to(ROOT)}:{node.lineno}"
            yield f"{where}: the docstring of {node.name} begins with {first[0]!r}: write a verb"


def _is_property(decorator: ast.expr) -> bool:
    return "property" in ast.unparse(decorator)


def _texts(path: Path) -> Iterator[tuple[int, str]]:
    if path.suffix == ".md":
        yield 1, path.read_text()
        return
    kinds = {tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", -1)}
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.type in kinds:
                yield token.start[0], token.string


def table() -> str:
    """Return the number of matches per folder, as Markdown."""
    counts: Counter[str] = Counter()
    for path in files((*IN_SCOPE, "sundog", "tests", "examples", "scripts", "data")):
        parts = path.relative_to(ROOT).parts
        folder = (
            "/".join(parts[:2]) if parts[0] in ("sundog", "tests") and len(parts) > 2 else parts[0]
        )
        counts[folder] += len(list(matches(path)))
    rows = [f"| `{folder}` | {number} |" for folder, number in sorted(counts.items())]
    return "\n".join(["| folder | matches |", "|---|--:|", *rows, f"| all | {counts.total()} |"])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
