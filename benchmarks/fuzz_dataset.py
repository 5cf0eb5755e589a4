"""Fuzz the dataset's reader and commands: `python -m benchmarks.fuzz_dataset [--cases 20000]`.

A case takes a base of three files, damages some of them (bytes, lines, cells, JSON values, packed
graphs), and runs one of the five `sundog data` commands on it. The command must end with status 0,
1 or 2, without a traceback, within 30 s. At the end the peak memory of each process is reported.
"""

from __future__ import annotations

import argparse
import base64
import json
import multiprocessing
import os
import platform
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from sundog.dataset import Recorder, RunInfo, data_command, ir_id_of
from sundog.dataset.graph_file import GraphReader, Place
from sundog.dataset.hardware import _cpu_name, versions

ENDINGS = ("csv", "meta.jsonl", "ir.jsonl")
COMMANDS = ("info", "validate", "join", "export", "show")
SECONDS = 30
PICTURES = 200  # every 200th `show` draws; the others print
Files = dict[str, bytes]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--cases", type=int, default=20_000)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="where to write the result")
    parser.add_argument("--commit", default="unknown", help="that is tested")
    options = parser.parse_args()
    begin = time.perf_counter()
    each = -(-options.cases // options.processes)
    tasks = [(each, options.seed + i * 1000) for i in range(options.processes)]
    if options.processes == 1:
        found = [fuzz(*tasks[0])]
    else:
        with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
            found = pool.starmap(fuzz, tasks)
    seconds = time.perf_counter() - begin
    counts = sum((counts for counts, _, _ in found), Counter[str]())
    failures = [failure for _, failures, _ in found for failure in failures]
    peak = max(peak for _, _, peak in found)
    print(f"{counts.total()} cases in {seconds:.0f} s, peak {peak} MB, {len(failures)} failures")
    print("\n\n".join(failures[:5]))
    if options.json is not None:
        content = report(options, counts, seconds, peak, len(failures))
        options.json.write_text(json.dumps(content, indent=1) + "\n")
    return 1 if failures else 0


def fuzz(cases: int, first_seed: int) -> tuple[Counter[str], list[str], int]:
    """Run cases; return how many of each command, what failed, and the peak memory in MB."""
    counts: Counter[str] = Counter()
    failures: list[str] = []
    with tempfile.TemporaryDirectory(dir=_memory()) as folder:
        bases = make_bases(folder)
        while counts.total() < cases:
            wanted = min(500, cases - counts.total())
            _batch(wanted, first_seed + counts.total(), bases, folder, counts, failures)
            print(
                f"{counts.total()} of {cases}, {len(failures)} failures",
                file=sys.stderr,
                flush=True,
            )
    return counts, failures, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10


def _memory() -> str | None:
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def _batch(
    wanted: int,
    number: int,
    bases: list[Files],
    folder: str,
    counts: Counter[str],
    failures: list[str],
) -> None:
    @seed(number)
    @settings(
        max_examples=wanted,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(st.data())
    def case(data: st.DataObject) -> None:
        files = damaged(data, data.draw(st.sampled_from(bases)))
        command = data.draw(st.sampled_from(COMMANDS))
        draws = counts["show"] % PICTURES == 0
        counts[command] += 1
        if wrong := run(command, files, folder, draws):
            failures.append(f"seed {number}, {command}: {wrong}")
            print(failures[-1], file=sys.stderr, flush=True)

    case()


def make_bases(folder: str) -> list[Files]:
    """Make two runs with graphs, as they are written now, and as version 1 wrote them."""
    base = os.path.join(folder, "seed")
    for name in ("a", "b"):
        with Recorder(base, _info(name), graph=_graph(2)) as recorder:
            trial = recorder.start({"B": 1}, decorator="B=1", generation=1)
            ids = [recorder.add_graph(_graph(n)) for n in (5, 6)]
            trial.end("ok", samples=[1.0, 2.0, 4.0], ir_id=[i for i in ids if i], timer="events")
            trial.end("ok", perf_ms=0.7, metrics={"spills": 0})
            recorder.start({"B": [2, None]}).end("error", error='no "room",\nnone')
    now = {ending: Path(f"{base}.{ending}").read_bytes() for ending in ENDINGS}
    return [now, {**now, "ir.jsonl": _version_1(base, now["ir.jsonl"])}]


def _info(name: str) -> RunInfo:
    source = {"name": name, "path": "k.py", "text": name, "captures": {"N": 4}, "options": {}}
    arguments = [{"name": "x", "kind": "tensor", "dtype": "f32", "shape": [4], "stride": [1]}]
    hardware = {"name": "gpu", "capability": "9.0"}
    return RunInfo(name, [source], {"a": 1}, arguments, {}, 2, "sim", hardware, {"triton": "3"})


def _graph(nodes: int) -> Any:
    record: Any = {
        "schema_version": 1,
        "run_id": None,
        "directed": True,
        "multigraph": True,
        "graph": {"frontend": "test", "kernel_name": "k"},
        "nodes": [{"id": f"op{i}", "op": "tt.load", "type": ["f32", i]} for i in range(nodes)],
        "links": [
            {"source": f"op{i}", "target": f"op{i + 1}", "key": 0, "edge_kind": "data"}
            for i in range(nodes - 1)
        ],
    }
    return {**record, "ir_id": ir_id_of(record)}


def _version_1(base: str, data: bytes) -> bytes:
    reader, offset = GraphReader(f"{base}.ir.jsonl"), 0
    for line in data.splitlines(keepends=True):
        reader.places[json.loads(line)["ir_id"]] = Place(offset, len(line))
        offset += len(line)
    return b"".join(json.dumps(reader.record(i)).encode() + b"\n" for i in reader.places)


def damaged(data: st.DataObject, files: Files) -> Files:
    """Damage one file or several, up to four times."""
    found = dict(files)
    for _ in range(data.draw(st.integers(1, 4))):
        ending = data.draw(st.sampled_from(ENDINGS))
        kinds: list[Callable[[st.DataObject, bytes], bytes]] = [_bytes, _lines, _cell]
        if ending != "csv":
            kinds += [_value, _value, _value]
        if ending == "ir.jsonl":
            kinds += [_packed, _packed]
        found[ending] = data.draw(st.sampled_from(kinds))(data, found[ending])
    return found


def _bytes(data: st.DataObject, text: bytes) -> bytes:
    """Replace a slice with other bytes."""
    start = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(start, min(len(text), start + 50)))
    return text[:start] + data.draw(st.binary(max_size=20)) + text[end:]


def _lines(data: st.DataObject, text: bytes) -> bytes:
    """Remove, repeat, move, join or cut a line."""
    lines = text.splitlines(keepends=True) or [b""]
    at = data.draw(st.integers(0, len(lines) - 1))
    how = data.draw(st.sampled_from(["remove", "repeat", "move", "join", "cut", "end"]))
    if how == "remove":
        del lines[at]
    elif how == "end":
        del lines[at:]
    elif how == "cut":
        lines[at] = lines[at][: data.draw(st.integers(0, len(lines[at])))]
    elif how == "join":
        lines[at] = lines[at].rstrip(b"\n")
    else:
        line = lines.pop(at) if how == "move" else lines[at]
        lines.insert(data.draw(st.integers(0, len(lines))), line)
    return b"".join(lines)


_CELLS = st.one_of(
    st.text(max_size=20),
    st.sampled_from(["", "nan", "-1", "1e400", "9" * 25, "0x10", '"', "a,b", "[" * 2000, "\0"]),
    st.integers().map(str),
    st.floats().map(repr),
)


def _cell(data: st.DataObject, text: bytes) -> bytes:
    """Replace what stands between two commas."""
    cells = text.split(b",")
    at = data.draw(st.integers(0, len(cells) - 1))
    cells[at] = data.draw(_CELLS).encode("utf-8", "surrogatepass")
    return b",".join(cells)


_JSON = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(),
        st.text(max_size=10),
        st.sampled_from([10**25, -1, "start", "end", "0" * 64, "../x", "\ud800", "a~1", 1e308]),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)


def _value(data: st.DataObject, text: bytes) -> bytes:
    """Replace, add or remove one value somewhere in a record."""
    lines = text.splitlines()
    if not lines:
        return text
    at = data.draw(st.integers(0, len(lines) - 1))
    try:
        record = json.loads(lines[at])
    except (ValueError, RecursionError):
        return text
    places: list[Any] = [record] if isinstance(record, (dict, list)) and record else []
    for place in places:
        inner = place.values() if isinstance(place, dict) else place
        places += [value for value in inner if isinstance(value, (dict, list)) and value]
    if places:
        place = data.draw(st.sampled_from(places))
        key = data.draw(
            st.sampled_from(list(place) if isinstance(place, dict) else range(len(place)))
        )
        if isinstance(place, dict) and data.draw(st.booleans()) and data.draw(st.booleans()):
            del place[key]
        else:
            place[key] = data.draw(_JSON)
    lines[at] = json.dumps(record, separators=(",", ":")).encode()
    return b"\n".join(lines) + b"\n"


def _packed(data: st.DataObject, text: bytes) -> bytes:
    """Change bytes inside a packed graph."""
    lines = text.splitlines()
    if not lines:
        return text
    at = data.draw(st.integers(0, len(lines) - 1))
    try:
        record = json.loads(lines[at])
        packed = base64.b85decode(record["packed"])
    except (ValueError, TypeError, KeyError, RecursionError):
        return text
    lines[at] = json.dumps(
        {**record, "packed": base64.b85encode(_bytes(data, packed)).decode()}
    ).encode()
    return b"\n".join(lines) + b"\n"


def run(command: str, files: Files, folder: str, draws: bool) -> str | None:
    """Run one command on the files; return what is wrong with how it ended, or None."""
    base = os.path.join(folder, "case")
    for ending, data in files.items():
        Path(f"{base}.{ending}").write_bytes(data)
    data_command._has_matplotlib = lambda: draws
    signal.signal(signal.SIGALRM, _too_late)
    signal.alarm(SECONDS)
    try:
        result = CliRunner().invoke(data_command.app, [command, base])
    finally:
        signal.alarm(0)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        return "".join(traceback.format_exception(result.exception))[-3000:]
    if result.exit_code not in (0, 1, 2):
        return f"status {result.exit_code}"
    return None


def _too_late(signum: int, frame: object) -> None:
    raise TimeoutError(f"no end after {SECONDS} s")


def report(
    options: argparse.Namespace, counts: Counter[str], seconds: float, peak: int, failures: int
) -> dict[str, Any]:
    """Return the result as docs/measured.md shows it."""
    known = versions()
    return {
        "kind": "table",
        "title": "Fuzzing the dataset's files and commands",
        "text": (
            f"{counts.total():,} cases in {seconds:.0f} s by {options.processes} processes: each "
            "damages some of a base's three\nfiles and runs one command on them. "
            f"{failures} ended in a traceback, another status than 0, 1 or 2,\nor not within "
            f"{SECONDS} s. The largest process took {peak} MB."
        ),
        "machine": {
            **{name: str(known[name]) for name in ("torch", "triton", "python", "sundog")},
            "gpu": f"{os.cpu_count()} CPU cores ({_cpu_name() or platform.machine()})",
            "commit": options.commit,
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "command": f"python -m benchmarks.fuzz_dataset --cases {options.cases}",
        },
        "head": ["command", "cases"],
        "rows": [[f"`sundog data {name}`", f"{counts[name]:,}"] for name in COMMANDS],
    }


if __name__ == "__main__":
    sys.exit(main())
