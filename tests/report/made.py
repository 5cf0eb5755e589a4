"""Small files as the commands write them, for pages to show."""

from __future__ import annotations

from typing import Any

HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)>&amp;\u2028</script>"


def check_content(kernel: str = "pass_right") -> dict[str, Any]:
    """A race of two ranks: a store, a signal that is heard, a load; as `check --json` writes it."""
    side = {
        "rank": 0, "program": [0, 0, 0], "kernel": kernel, "file": "k.py", "line": 2,
        "text": "tl.store(...)", "stack": ["k.py:2 f"], "verb": "store", "sem": "", "scope": "",
        "allocation": "inbox", "indices": "[0:8]",
    }  # fmt: skip
    other = side | {"rank": 1, "line": 4, "verb": "load"}
    finding = {
        "kind": "race", "rule": "relaxed release", "why": f"because of {kernel}", "first": side,
        "second": other, "suggestion": "Signal with release.", "token": "random:7", "count": 2,
        "is_strict": False, "run": 0, "events": [2, 5],
    }  # fmt: skip

    def place(lane: int, what: str, line: int, sem: str = "") -> dict[str, Any]:
        scope = "sys" if sem else ""
        file = "k.py" if line else ""
        return {"lane": lane, "what": what, "sem": sem, "scope": scope, "file": file, "line": line}

    run = {
        "token": "random:7", "dropped": 0, "failure": "", "waits": [], "hosts": [],
        "lanes": [
            {"rank": 0, "kernel": "host", "program": None},
            {"rank": 0, "kernel": kernel, "program": [0, 0, 0]},
            {"rank": 1, "kernel": "host", "program": None},
            {"rank": 1, "kernel": kernel, "program": [0, 0, 0]},
        ],
        "places": [
            place(0, "kernel launch", 0), place(2, "kernel launch", 0), place(1, "store", 2),
            place(1, "atomic XCHG", 3, "relaxed"), place(3, "atomic ADD", 3, "acquire"),
            place(3, "load", 4),
        ],
        "events": [
            [0, "", 1], [1, "", 1], [2, "inbox[0:8]", 1], [3, "flag[0]", 1], [4, "flag[0]", 3],
            [5, "inbox[0:8]", 1],
        ],
        "edges": [[0, 2, "launch"], [1, 4, "launch"], [3, 4, "heard"]],
    }  # fmt: skip
    return {
        "kind": "check", "schema_version": 1, "machine": {"torch": "2.13.0", "sundog": "0.1.0"},
        "target": "k.py:main", "world": 2, "coverage": "", "schedules": 3, "asked": 3,
        "findings": [finding], "notes": [], "remarks": [], "mutants": [], "runs": [run],
        "source": {"k.py": {"first": 1, "lines": ["def f():", f" # {kernel}", " flag", " load"]}},
    }  # fmt: skip


def trace_content(spans: int = 40, ranks: int = 2) -> dict[str, Any]:
    """Programs that fetch, compute and wait for the other rank's signal by turns."""
    events: list[dict[str, Any]] = []

    def span(kind: str, rank: int, program: int, begin: float, length: float, ended: int) -> None:
        args = {"what": 8, "value": 1, "peer": ended, "ended_by": ended if kind == "wait" else -1}
        place = {"pid": rank, "tid": program, "ts": begin, "dur": length}
        events.append({"ph": "X", "name": kind, **place, "args": args})

    for number in range(spans // 4):
        rank, program, begin = number % ranks, number // ranks % 16, 10.0 * (number // ranks // 16)
        peer = (rank + 1) % ranks
        span("fetch", rank, program, begin, 4, peer)
        span("compute", rank, program, begin + 2, 3, peer)
        span("signal", rank, program, begin + 5, 0.001, peer)
        span("wait", rank, program, begin + 6, 3, peer)
        for phase, who, time in (("s", peer, begin + 5), ("f", rank, begin + 9)):
            place = {"pid": who, "tid": program, "ts": time}
            events.append({"ph": phase, "id": number, "cat": "signal", "name": "signal", **place})
    about = {"op": "all_gather.push", "time": "ns", "clocks": "one clock", "dropped": 3}
    return {"otherData": about, "traceEvents": events}


def bench_content(faster: float = 1.0, commit: str = "aaaa") -> dict[str, Any]:
    """Two algorithms that cross, and a baseline; `faster` divides the times of one."""
    rows = []
    for numel in (1024, 65536, 1 << 20):
        times = {"one_shot": 4 + numel / 4000, "two_shot": (9 + numel / 16000) / faster}
        for variant, micro in (times | {"add_": 20 + numel / 2000}).items():
            rows.append({
                "variant": variant,
                "problem": f"Problem(numel={numel}, dtype=torch.bfloat16, size=8)",
                "config": "" if variant == "add_" else "Config(block=1024)", "programs": 4,
                "flops": 7 * numel, "hbm_bytes": 4 * numel, "link_bytes": numel, "limit_ns": 100.0,
                "stored_ns": 0.0, "wrong": "",
                "times": {
                    "name": variant,
                    "samples_ns": [[1e3 * micro * s] * 2 for s in (1, 1.01, 1.02)],
                },
            })  # fmt: skip
    rates = {"copy": 4.2e12, "fill": 3.3e12, "read": 4.5e12, "gemm": 8e14, "link": 0.0}
    return {
        "kind": "op", "op": "all_reduce", "world": 8, "backend": "virtual", "link": "", "plot": "",
        "machine": {"gpu": "NVIDIA H200", "commit": commit}, "rates": rates, "rows": rows,
    }  # fmt: skip


def probe_content(verdict: str = "NOT CAPTURABLE") -> dict[str, Any]:
    """One op that is captured, one that is not."""

    def row(name: str, verdict: str, reason: str, where: str) -> dict[str, Any]:
        cell = {
            "verdict": verdict,
            "detail": reason,
            "replay": -1,
            "reason": reason,
            "where": where,
        }
        return {
            "name": name,
            "verdict": verdict,
            "expected": "CAPTURABLE",
            "columns": {"replays": cell},
        }

    return {
        "kind": "probe",
        "machine": {"torch": "2.13.0"},
        "world": 2,
        "backend": "sim",
        "replays": 12,
        "rows": [
            row("all_gather.push", "CAPTURABLE", "", ""),
            row("mine.py:main", verdict, "reads a tensor on the host", "mine.py:12"),
        ],
    }
