"""Count what makes a package hard to find one's way in: files, names that collide, long imports.

    python scripts/house.py             # the figures; tests/test_house.py holds them to its budgets
    python scripts/house.py --goals     # the goals of the redesign, as a table
    python scripts/house.py --since REV     # lines by folder, in files of REV and in newer ones

Lines are physical lines. Imports inside functions count; those for type checking do not.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = "sundog"


@dataclass(frozen=True)
class Module:
    """One file, parsed."""

    name: str  # sundog.ops.op
    path: Path
    lines: int
    tree: ast.Module = field(repr=False, compare=False)

    @property
    def folder(self) -> str:
        """The package's top folders one by one, the tools' too; "(top)" for its own files."""
        _, *parts = self.name.split(".")
        return "/".join((parts if self.is_init else parts[:-1])[:2]) or "(top)"

    @property
    def is_init(self) -> bool:
        return self.path.stem == "__init__"


@dataclass(frozen=True)
class House:
    """All modules of the package, and what is counted of them."""

    modules: dict[str, Module]

    @staticmethod
    def read(root: Path = ROOT) -> House:
        modules = {}
        for path in sorted((root / PACKAGE).rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            text = path.read_text()
            modules[name] = Module(name, path, text.count("\n"), ast.parse(text))
        return House(modules)

    @cached_property
    def lines(self) -> dict[str, int]:
        """Lines by folder."""
        found: dict[str, int] = defaultdict(int)
        for module in self.modules.values():
            found[module.folder] += module.lines
        return dict(found)

    @cached_property
    def colliding_stems(self) -> dict[str, list[str]]:
        return _repeated((m.path.stem, name) for name, m in self.modules.items() if not m.is_init)

    @cached_property
    def colliding_classes(self) -> dict[str, list[str]]:
        return _repeated(
            (node.name, name)
            for name, module in self.modules.items()
            for node in ast.walk(module.tree)
            if isinstance(node, ast.ClassDef)
        )

    @cached_property
    def imports(self) -> dict[str, set[str]]:
        return {name: set(self._imports(module)) for name, module in self.modules.items()}

    @cached_property
    def one_importer(self) -> dict[str, str]:
        """Modules that a single other one imports, and which."""
        importers: dict[str, set[str]] = defaultdict(set)
        for name, imported in self.imports.items():
            for other in imported - {name}:
                importers[other].add(name)
        single = {name: each for name, each in importers.items() if len(each) == 1}
        return {n: min(e) for n, e in sorted(single.items()) if not self.modules[n].is_init}

    def closure(self, name: str) -> set[str]:
        """Return a module and all that importing it reads, without __init__ files."""
        found, left = set(), [name]
        while left:
            each = left.pop()
            if each not in found:
                found.add(each)
                left += self._imports(self.modules[each], lazy=False)
        return {each for each in found if not self.modules[each].is_init}

    @cached_property
    def closures(self) -> dict[str, set[str]]:
        """Closures of all collectives."""
        names = (name for name in self.modules if name.startswith("sundog.collectives."))
        return {name: self.closure(name) for name in names}

    def _imports(self, module: Module, lazy: bool = True) -> Iterator[str]:
        for node in _import_nodes(module.tree, lazy):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            else:
                base = self._base(module, node)
                names = [f"{base}.{alias.name}" for alias in node.names] + [base]
            yield from (name for name in names if name in self.modules)

    def _base(self, module: Module, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        parts = module.name.split(".")
        package = parts if module.is_init else parts[:-1]
        package = package[: len(package) - node.level + 1]
        return ".".join([*package, *([node.module] if node.module else [])])

    @cached_property
    def wide_kernels(self) -> dict[str, int]:
        """Count the arguments of each jit function, and an annotated NamedTuple by its fields."""
        fields = {
            node.name: sum(isinstance(each, ast.AnnAssign) for each in node.body)
            for module in self.modules.values()
            for node in ast.walk(module.tree)
            if isinstance(node, ast.ClassDef)
            and any(ast.unparse(base) == "NamedTuple" for base in node.bases)
        }
        return {
            f"{name}.{node.name}": sum(
                fields.get(ast.unparse(arg.annotation) if arg.annotation else "", 1)
                for arg in [*node.args.args, *node.args.kwonlyargs]
            )
            for name, module in self.modules.items()
            for node in ast.walk(module.tree)
            if isinstance(node, ast.FunctionDef) and any(map(_is_jit, node.decorator_list))
        }


def _import_nodes(tree: ast.AST, lazy: bool) -> Iterator[ast.Import | ast.ImportFrom]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        elif lazy or not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _import_nodes(node, lazy)


def _is_jit(decorator: ast.expr) -> bool:
    target = decorator.func if isinstance(decorator, ast.Call) else decorator
    return ast.unparse(target).rpartition(".")[2] == "jit"


def _repeated(pairs: Iterator[tuple[str, str]]) -> dict[str, list[str]]:
    places: dict[str, list[str]] = defaultdict(list)
    for name, place in pairs:
        places[name].append(place)
    return {name: each for name, each in sorted(places.items()) if len(each) > 1}


def main(words: list[str]) -> None:
    house = House.read()
    if words == ["--goals"]:
        print(goals(house))
    elif words[:1] == ["--since"]:
        print(account(house, added_since(words[1])))
    else:
        _print_all(house)


def goals(house: House) -> str:
    """Return the table of goals, as Markdown: what, now, goal."""
    import call_path
    import prose

    modules = house.modules.values()
    single = beside_tables(house)
    first, _, third = map(len, call_path.files_of_a_call())
    names = f"{len(house.colliding_stems)} / {len(house.colliding_classes)}"
    phrases = [line for path in prose.files(prose.IN_SCOPE) for line in prose.matches(path)]
    rows = [
        ("files / lines", f"{len(modules)} / {sum(m.lines for m in modules)}", "170 / 28000"),
        ("top-level files", sum(m.folder == "(top)" for m in modules), 11),
        ("import closure of a collective", max(map(len, house.closures.values())), 12),
        ("files crossed by a first / repeated all_gather", f"{first} / {third}", "18 / 7"),
        ("host collectives for a new plan", len(call_path.talk_of_a_plan()), 2),
        ("colliding file / class names", names, "0 / 5"),
        ("modules with one importer, what tables name left out", len(single), 35),
        ("matches of the prose check", len(phrases), 0),
    ]
    lines = [f"| {what} | {now} | {goal} |" for what, now, goal in rows]
    return "\n".join(["| | now | goal |", "|---|--:|--:|", *lines])


def beside_tables(house: House) -> dict[str, str]:
    """Return `one_importer` without what a table names: commands, algorithms, rules."""
    from sundog.checker.rules import WATCHING
    from sundog.cli import COMMANDS
    from sundog.ops.op import FUNCTIONS, OPS

    named = {f"{PACKAGE}.tools.{home}" for _, home in COMMANDS.values()}
    named |= {*OPS.values(), *FUNCTIONS.values(), *(f"{PACKAGE}.checker.{r}" for r in WATCHING)}
    entries = (f"{PACKAGE}.cli", f"{PACKAGE}.__main__")
    single = house.one_importer.items()
    return {name: by for name, by in single if by not in entries and name not in named}


def added_since(revision: str) -> set[Path]:
    """Return the files that commits after a revision added; a renamed file is not new."""
    command = ["git", "log", "-M", "--diff-filter=A", "--name-only", "--format="]
    shown = subprocess.run(
        [*command, f"{revision}..HEAD", "--", PACKAGE],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    return {ROOT / line for line in shown.splitlines()}


def account(house: House, added: set[Path]) -> str:
    """Return a table of files and lines by folder, older and newer, as Markdown."""
    counts: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0, 0])
    for module in house.modules.values():
        for folder in (module.folder, "all"):
            at = 2 if module.path in added else 0
            counts[folder][at] += 1
            counts[folder][at + 1] += module.lines
    rows = [f"| {folder} | {' | '.join(map(str, each))} |" for folder, each in counts.items()]
    head = ["| | files | lines | newer files | their lines |", "|---|--:|--:|--:|--:|"]
    return "\n".join(head + sorted(rows))


def _print_all(house: House) -> None:
    modules = house.modules.values()
    print(f"{len(modules)} files, {sum(m.lines for m in modules)} lines")
    for folder, lines in sorted(house.lines.items()):
        print(f"  {folder:24} {lines:6}")
    print("longest:", max((m.lines, m.name) for m in modules))
    print("colliding stems:", house.colliding_stems)
    print(f"colliding classes ({len(house.colliding_classes)}):")
    for name, places in house.colliding_classes.items():
        print(f"  {name}: {' '.join(places)}")
    print(f"modules with one importer ({len(house.one_importer)}):")
    for name, importer in house.one_importer.items():
        print(f"  {name} <- {importer}")
    largest = max(house.closures.items(), key=lambda each: len(each[1]))
    print("largest import closure of a collective:", len(largest[1]), largest[0])
    print("widest kernels:", sorted(house.wide_kernels.items(), key=lambda e: -e[1])[:6])


if __name__ == "__main__":
    main(sys.argv[1:])
