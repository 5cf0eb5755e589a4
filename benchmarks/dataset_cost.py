"""`python -m benchmarks dataset`: what the dataset costs, by loading, writing and extraction.

Loading takes rows, runs, the parse of every graph, and every graph as a networkx graph: under 10 s
on 2 cores. Writing both rows of a configuration (started, ended) takes under 1 % of a tuning run,
whose fastest configurations take 25 ms. Extraction makes the graph record of a compiled module of
an attention kernel, a loop with two dots, an online softmax and a causal mask: at most 150 ms.
"""

# A jit function's arguments are tiles and pointers, which have no Python type:
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl

from sundog.dataset import IrGraphRecord, Recorder, RunInfo, ir_id_of, read
from sundog.dataset.identity import config_json, sample_id_of
from sundog.dataset.ir_graph import canonical_json
from sundog.dataset.rows import format_row
from sundog.dataset.schema import csv_header
from sundog.dataset.triton.compile import lower
from sundog.dataset.triton.ttir import extract_ttir_graph, rebuild_module_text

from .result_files import Figures

ROWS, GRAPHS, GOAL_S = 1_000_000, 1_000, 10
FASTEST_CONFIG_S = 0.025  # code generation alone, the cheapest that a tuner sees
NUM_NODES, NUM_LINKS = 120, 180  # between attention in Helion (61, 86) and in TTGIR
REPEATS, LIMIT_MS = 21, 150.0  # of an extraction
_CONFIGS = 2000  # that are written


def main(json_path: str) -> None:
    """Print a table. With a path, also write it for docs/measured.md."""
    text = (
        f"Made-up graphs of {NUM_NODES} nodes; a configuration is two rows and 100 samples, and "
        f"the share is that of one which takes {FASTEST_CONFIG_S * 1e3:.0f} ms. Graphs are of an "
        f"attention-sized Triton kernel, {REPEATS} extractions each."
    )
    figures = Figures("The dataset", text, ["what", "measured", "goal"], _files() + _graphs())
    figures.show(json_path, on_cpu=True)


def _files() -> list[list[str]]:
    with tempfile.TemporaryDirectory() as folder:
        base = os.path.join(folder, "large")
        make_base(base, ROWS, GRAPHS)
        load = time_load(base)
        write = time_write(os.path.join(folder, "small"))
    seconds = load["read_s"] + load["networkx_s"]
    what = f"load {ROWS:,} rows and {GRAPHS:,} graphs, all as networkx"
    return [
        [what, f"{seconds:.1f} s ({load['cpu_s']:.1f} s of CPU)", f"{GOAL_S} s"],
        ["record a configuration", f"{write['median_us']:.0f} us ({write['share']:.2%})", "1 %"],
    ]


def _graphs() -> list[list[str]]:
    return [
        [
            f"graph of the {stage.upper()} for {arch}",
            f"{statistics.median(times):.0f} ms (worst {max(times):.0f})",
            f"{LIMIT_MS:.0f} ms",
        ]
        for arch, stage, times, _ in _extractions()
    ]


def print_graphs() -> None:
    """Print what is in the record of each stage, and how long its extraction takes."""
    print(f"{'arch':8}{'stage':7}{'median ms':>10}{'worst ms':>10}{'ops':>6}{'edges':>7}{'kB':>7}")
    for arch, stage, times, record in _extractions():
        rebuild_module_text(record)
        ops = sum(node["node_kind"] == "op" for node in record["nodes"])
        size = len(canonical_json(record)) / 1e3
        row = f"{statistics.median(times):10.1f}{max(times):10.1f}{ops:6}"
        print(f"{arch:8}{stage:7}{row}{len(record['links']):7}{size:7.0f}")
    print(f"the limit is {LIMIT_MS:.0f} ms")


# files


def made_up_graph(number: int) -> IrGraphRecord:
    """Make a graph with as many fields as a real one; each number is another graph."""
    nodes = [
        {
            "id": f"g0:n{i}",
            "graph_id": 0,
            "op_kind": "call_function",
            "target": f"aten.op{(i * 7 + number) % 40}.default",
            "dtype": "torch.float16",
            "shape": ["u0", "64"],
            "concrete_shape": [None, 64],
            "stride": ["64", "1"],
            "args": [{"node": f"g0:n{i - 1}"}, {"literal": number}, None],
            "source_loc": f"pkg/kernel{number}.py:{i}",
            "lowering_class": "PointwiseLowering",
        }
        for i in range(NUM_NODES)
    ]
    links = [
        {
            "source": f"g0:n{i * 13 % NUM_NODES}",
            "target": f"g0:n{(i * 13 + 1) % NUM_NODES}",
            "key": i,
            "edge_kind": "data",
            "arg_positions": [0],
            "dtype": "torch.float16",
        }
        for i in range(NUM_LINKS)
    ]
    record: IrGraphRecord = {
        "schema_version": 1,
        "ir_id": "",
        "run_id": None,
        "directed": True,
        "multigraph": True,
        "graph": {"frontend": "made up", "kernel_name": f"kernel{number}"},
        "nodes": nodes,
        "links": links,
    }
    return {**record, "ir_id": ir_id_of(record)}


def made_up_run(number: int) -> RunInfo:
    source = {"name": "k", "path": "k.py", "text": f"def k{number}(): ...", "captures": {}}
    return RunInfo(f"kernel{number}", [{**source, "options": {}}], {}, [], {}, 1)


def make_base(base: str, num_rows: int, num_graphs: int) -> None:
    """Write runs with a graph each, and spread the rows over them, as a recorder would."""
    per_run = max(num_rows // num_graphs // 2, 1)
    with open(f"{base}.csv", "w", encoding="utf-8") as file:
        file.write(csv_header())
        for run in range(num_graphs):
            graph = made_up_graph(run)
            with Recorder(base, made_up_run(run), graph=graph) as recorder:
                file.writelines(_rows(recorder, graph["ir_id"], per_run))


def _rows(recorder: Recorder, ir_id: str, count: int) -> list[str]:
    lines = []
    for i in range(count):
        config = config_json({"block_sizes": [16 << i % 4, 32], "num_warps": 1 << i % 4, "i": i})
        row = {
            "run_id": recorder.run_id,
            "kernel_id": recorder.kernel_id,
            "sample_id": sample_id_of(recorder.run_id, config),
            "timestamp_s": i * 0.1,
            "config_index": i,
            "generation": i // 100,
            "status": "started",
            "decorator": f"helion.Config(block_sizes=[{16 << i % 4}, 32], num_warps={1 << i % 4})",
            "config": config,
            "session": recorder.session,
            "repeat": 0,
            "world": 1,
        }
        times = dict.fromkeys(("perf_ms", "min_ms", "p10_ms", "p50_ms", "p90_ms"), 0.5 + i % 97)
        ended = {**row, "status": "ok", **times, "compile_time_s": 0.3, "num_samples": 100}
        ended["ir_id"] = ir_id
        lines += [format_row(row), format_row(ended)]
    return lines


def time_load(base: str) -> dict[str, float]:
    start, cpu = time.perf_counter(), time.process_time()
    data = read(base)
    loaded = time.perf_counter()
    nodes = sum(len(data.graph(ir_id)) for ir_id in data.graphs.ir_id)
    assert nodes == NUM_NODES * len(data.graphs)
    assert data.damage == []
    found = {"rows": len(data.rows), "graphs": len(data.graphs), "read_s": loaded - start}
    found["networkx_s"] = time.perf_counter() - loaded
    return {**found, "cpu_s": time.process_time() - cpu}


def time_write(base: str) -> dict[str, float]:
    """Time the two rows of a configuration, with 100 samples in the second."""
    samples = [0.5 + i % 17 / 1000 for i in range(100)]
    seconds = []
    with Recorder(base, made_up_run(0)) as recorder:
        for i in range(_CONFIGS):
            config = {"block_sizes": [64, 32, i], "num_warps": 4, "num_stages": 3}
            start = time.perf_counter()
            trial = recorder.start(config, decorator=str(config))
            trial.end("ok", samples=samples, compile_time_s=0.3)
            seconds.append(time.perf_counter() - start)
    median, slow = statistics.median(seconds), statistics.quantiles(seconds, n=100)[98]
    return {"median_us": median * 1e6, "p99_us": slow * 1e6, "share": median / FASTEST_CONFIG_S}


# extraction


def _extractions() -> Iterator[tuple[str, str, list[float], IrGraphRecord]]:
    """Yield architecture, stage, the milliseconds of each extraction, and the record."""
    half = torch.empty(1 << 20, dtype=torch.float16, device="meta")
    args = (half, half, half, half, 0.125, 65536, 1024)
    options = {"BLOCK_M": 128, "BLOCK_N": 64, "HEAD": 64, "num_warps": 4, "num_stages": 3}
    for arch in ("sm_90", "gfx942"):
        for stage in ("ttir", "ttgir"):
            yield arch, stage, *_extract(lower(attention, args, options, arch=arch, stage=stage))


def _extract(module: Any) -> tuple[list[float], IrGraphRecord]:
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        record = extract_ttir_graph(module)
        times.append((time.perf_counter() - start) * 1e3)
    return times, record


@triton.jit
def attention(
    q_ptr, k_ptr, v_ptr, out_ptr, scale, stride_head, num_keys,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HEAD: tl.constexpr,
):  # fmt: skip
    """Compute causal attention of one block of rows of one head, which is contiguous."""
    start_m = tl.program_id(0)
    base = tl.program_id(1) * stride_head
    rows = start_m * BLOCK_M + tl.arange(0, BLOCK_M)
    keys = tl.arange(0, BLOCK_N)
    dims = tl.arange(0, HEAD)
    here = base + rows[:, None] * HEAD + dims[None, :]
    q = tl.load(q_ptr + here, mask=rows[:, None] < num_keys, other=0.0)
    high = tl.full([BLOCK_M], -float("inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    accumulator = tl.zeros([BLOCK_M, HEAD], dtype=tl.float32)
    for start in range(0, tl.minimum((start_m + 1) * BLOCK_M, num_keys), BLOCK_N):
        there = start + keys
        k_ptrs = k_ptr + base + there[None, :] * HEAD + dims[:, None]
        k = tl.load(k_ptrs, mask=there[None, :] < num_keys, other=0.0)
        scores = tl.where(rows[:, None] >= there[None, :], tl.dot(q, k) * scale, -1.0e6)
        new_high = tl.maximum(high, tl.max(scores, 1))
        p = tl.math.exp2(scores - new_high[:, None])
        shrink = tl.math.exp2(high - new_high)
        total = total * shrink + tl.sum(p, 1)
        v_ptrs = v_ptr + base + there[:, None] * HEAD + dims[None, :]
        v = tl.load(v_ptrs, mask=there[:, None] < num_keys, other=0.0)
        accumulator = tl.dot(p.to(tl.float16), v, accumulator * shrink[:, None])
        high = new_high
    out = (accumulator / total[:, None]).to(tl.float16)
    tl.store(out_ptr + here, out, mask=rows[:, None] < num_keys)
