"""Lines are followed from the source to PTX and back, through every stage, inlined ones too."""

from __future__ import annotations

import hashlib
import inspect
import json

import pytest
import torch
import triton
import triton.language as tl

from sundog.dataset.ir_graph import ir_id_of
from sundog.dataset.triton.compile import gpu_target, source_of
from sundog.dataset.triton.stage_lines import STAGES, StageLines, describe_stages
from sundog.dataset.triton.ttir import extract_ttir_graph

pytestmark = pytest.mark.compat


@triton.jit
def _scaled(x, scale):
    return tl.exp(x) * scale  # the callee


@triton.jit
def _kernel(x, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + i, i < n)  # the load
    value = _scaled(value, 3.0)  # the call
    tl.store(out + i, value, i < n)  # the store


LAST = {"sm_90": "ptx", "gfx942": "amdgcn"}
LOADS = {"ttir": "tt.load", "ttgir": "load ", "ptx": "ld.global", "amdgcn": "buffer_load"}
FILE = "test_stage_lines.py"


def line_of(comment: str) -> int:
    """Where a comment of the kernels stands in this file."""
    text = inspect.getsource(inspect.getmodule(line_of)).splitlines()  # type: ignore[arg-type]
    return next(n for n, line in enumerate(text, 1) if line.endswith(f"# {comment}"))


@pytest.fixture(scope="module", params=["sm_90", "gfx942"])
def compiled(request: pytest.FixtureRequest) -> object:
    x = torch.empty(1024, device="meta")
    source, options = source_of(_kernel, (x, x, 1000), {"BLOCK": 128}, arch=request.param)
    return triton.compile(source, target=gpu_target(request.param), options=options)


def test_hashes_are_of_the_texts(compiled: object) -> None:
    asm = compiled.asm  # type: ignore[attr-defined]
    found = describe_stages(asm)
    assert set(found["stages"]) == set(STAGES) & set(asm)
    assert len(found["stages"]) == 4
    for name, stage in found["stages"].items():
        assert stage["sha256"] == hashlib.sha256(asm[name].encode()).hexdigest()
        assert stage["num_lines"] == len(asm[name].splitlines())
    assert json.loads(json.dumps(found)) == found
    assert FILE in found["files"]  # and no folder of this machine
    assert not any(file.startswith("/") for file in found["files"])


def test_a_load_is_followed_to_every_stage_and_back(compiled: object) -> None:
    asm = compiled.asm  # type: ignore[attr-defined]
    lines = StageLines(describe_stages(asm))
    stages = [name for name in STAGES if name in asm]
    source = line_of("the load")
    for stage in stages:
        at = lines.follow(FILE, source, stage)
        assert at, stage
        texts = [asm[stage].splitlines()[n - 1] for n in at]
        assert stage == "llir" or any(LOADS[stage] in text for text in texts), (stage, texts)
        assert all((FILE, source) in lines.sources(stage, n) for n in at)
    for one in stages:
        loads = [
            n
            for n in lines.follow(FILE, source, one)
            if LOADS.get(one, "load") in asm[one].splitlines()[n - 1]
        ]
        for two in stages:
            if loads and one != two:
                there = lines.follow(one, loads[0], two)
                assert there, (one, two)
                assert any(loads[0] in lines.follow(two, n, one) for n in there)


def test_an_inlined_line_has_the_callee_and_the_call(compiled: object) -> None:
    lines = StageLines(describe_stages(compiled.asm))  # type: ignore[attr-defined]
    callee, call = (FILE, line_of("the callee")), (FILE, line_of("the call"))
    for stage in ("ttir", "ttgir", "llir"):
        at = lines.follow(*callee, stage)
        assert at
        assert any(lines.sources(stage, n) == [callee, call] for n in at), stage
        assert set(at) & set(lines.follow(*call, stage))


def test_a_stage_that_is_not_there(compiled: object) -> None:
    lines = StageLines(describe_stages(compiled.asm))  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="no stage 'cubin'"):
        lines.follow("ttir", 1, "cubin")
    assert lines.follow("ttir", 10**6, "ttgir") == []
    assert lines.sources("other.py", 3) == []


def test_the_record_of_a_compiled_kernel_has_its_stages(compiled: object) -> None:
    record = extract_ttir_graph(compiled)
    asm = compiled.asm  # type: ignore[attr-defined]
    assert record["graph"]["stages"] == describe_stages(asm)
    # Another version of ptxas is another PTX of the same TTGIR: the id stays.
    without = {**record, "graph": {**record["graph"], "stages": None}}
    assert ir_id_of(without) == record["ir_id"]  # type: ignore[arg-type]
    assert extract_ttir_graph(asm["ttgir"])["graph"]["stages"] is None
