"""Inline PTX: arithmetic, control flow, vectors, packing, threads, memory, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl
from triton.language import load as imported_load
from triton.language.math import rsqrt as imported_rsqrt

from sundog.errors import CannotInterpret, KernelError
from sundog.interpreter.ptx_lanes import _literal_lines
from sundog.interpreter.ptx_parse import Address, Immediate, Register, parse

from .launching import Run, launch

pytestmark = [pytest.mark.compat, pytest.mark.sim_only]


@triton.jit
def on_integers(x, out, ASM: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    found = tl.inline_asm_elementwise(
        ASM, "=r,r,r", [tl.load(x + at), at], dtype=tl.int32, is_pure=True, pack=1
    )
    tl.store(out + at, found)


def computed(run: Run, asm: str, x: torch.Tensor) -> list[int]:
    _, out = launch(run, on_integers, (1,), x, torch.zeros_like(x), ASM=asm, BLOCK=len(x))
    return out.tolist()


X = torch.tensor([5, -3, 0, 1 << 20], dtype=torch.int32)
ARITHMETIC = {
    "add.s32 $0, $1, $2;": [5, -2, 2, (1 << 20) + 3],
    "sub.s32 $0, $2, $1;": [-5, 4, 2, 3 - (1 << 20)],
    "mul.lo.s32 $0, $1, 3;": [15, -9, 0, 3 << 20],
    "mad.lo.s32 $0, $1, 2, $2;": [10, -5, 2, (1 << 21) + 3],
    "div.s32 $0, $1, 2;": [2, -1, 0, 1 << 19],
    "rem.s32 $0, $1, 2;": [1, -1, 0, 0],
    "min.s32 $0, $1, 1;": [1, -3, 0, 1],
    "max.u32 $0, $1, 1;": [5, -3, 1, 1 << 20],
    "mul.hi.s32 $0, $1, 0x60000000;": [1, -2, 0, 3 << 17],
    "mul.hi.u32 $0, $1, 0x60000000;": [1, 0x5FFFFFFE, 0, 3 << 17],
    "mad.hi.s32 $0, $1, 0x60000000, $2;": [1, -1, 2, (3 << 17) + 3],
    "{.reg .b64 %w; cvt.s64.s32 %w, $1; mul.hi.s64 %w, %w, 0x4000000000000000; cvt.u32.u64 $0, %w;"
    "}": [1, -1, 0, 1 << 18],
    "popc.b32 $0, $1;": [2, 31, 0, 1],
    "clz.b32 $0, $1;": [29, 0, 32, 11],
    "brev.b32 $0, $1;": [-(3 << 29), -(1 << 30) - 1, 0, 1 << 11],
    "{.reg .b64 %w; cvt.s64.s32 %w, $1; popc.b64 $0, %w;}": [2, 63, 0, 1],
    "{.reg .b64 %w; cvt.s64.s32 %w, $1; clz.b64 $0, %w;}": [61, 0, 64, 43],
    "shl.b32 $0, $1, 1;": [10, -6, 0, 1 << 21],
    "shr.s32 $0, $1, 1;": [2, -2, 0, 1 << 19],
    "and.b32 $0, $1, 0x5;": [5, 5, 0, 0],
    "not.b32 $0, $1;": [-6, 2, -1, ~(1 << 20)],
    "{.reg .pred %p; setp.lt.s32 %p, $1, 1; selp.s32 $0, 7, 8, %p;}": [8, 7, 7, 8],
    "{.reg .pred %p, %q; setp.lt.s32 %p|%q, $1, 1; selp.s32 $0, 7, 8, %q;}": [7, 8, 8, 7],
    "{.reg .pred p; setp.gt.s32 p, $1, 0; setp.gt.and.s32 p, $2, 0, p; selp.s32 $0, 1, 0, p;}": [
        0,
        0,
        0,
        1,
    ],
    "{.reg .pred p, q; setp.eq.s32 q, $2, 2; setp.eq.or.s32 p|q, $2, 0, q; selp.s32 $0, 1, 2, q;"
    "}": [
        2,
        1,
        1,
        1,
    ],
    "{.reg .pred %p; mov.b32 $0, 0; L${:uid}: add.s32 $0, $0, 1; setp.lt.s32 %p, $0, $2;"
    " @%p bra.uni L${:uid};}": [1, 1, 2, 3],
    "bar.sync 1, 128; mov.b32 $0, $2;": [0, 1, 2, 3],
    "{.reg .pred p; setp.gt.s32 p, $2, 9; @p trap; mov.b32 $0, 1;}": [1, 1, 1, 1],
    "{.reg .f32 %f; cvt.rn.f32.s32 %f, $1; mul.f32 %f, %f, 0.5; cvt.rzi.s32.f32 $0, %f;}": [
        2,
        -1,
        0,
        1 << 19,
    ],
}


@pytest.mark.parametrize("asm", ARITHMETIC)
def test_arithmetic(run: Run, asm: str) -> None:
    assert computed(run, asm, X) == ARITHMETIC[asm]


def test_each_lane_leaves_a_loop_by_itself(run: Run) -> None:
    asm = """
    {
        .reg .pred %more;
        mov.b32 $0, 0;
        next:  // count up to the lane's number
            setp.lt.s32 %more, $0, $2;
            @%more add.s32 $0, $0, 1;
            @%more bra next;
        add.s32 $0, $0, 100;
    }
    """
    assert computed(run, asm, X) == [100, 101, 102, 103]


def test_vector_registers_and_pairs_of_bfloat16(run: Run) -> None:
    @triton.jit
    def kernel(x, out, BLOCK: tl.constexpr):
        at = tl.arange(0, BLOCK)
        found = tl.inline_asm_elementwise(
            """
            {
                .reg .v2 .b32 %a;
                mov.v2.b32 %a, 0;
                mov.b64 {%a.x, %a.y}, $1;
                add.bf16x2 %a.x, %a.x, %a.x;
                mov.b64 $0, {%a.x, %a.y};
            }
            """,
            "=l,l",
            [tl.load(x + at)],
            dtype=tl.int64,
            is_pure=True,
            pack=1,
        )
        tl.store(out + at, found)

    x = torch.arange(16, dtype=torch.bfloat16).view(torch.int64)
    _, out = launch(run, kernel, (1,), x, torch.zeros_like(x), BLOCK=4)
    wanted = torch.arange(16, dtype=torch.bfloat16).view(4, 4)
    wanted[:, :2] *= 2
    assert torch.equal(out.view(torch.bfloat16), wanted.flatten())


def test_a_vector_register_is_loaded_and_stored_whole(run: Run) -> None:
    x = torch.arange(128, dtype=torch.int32)
    asm = "{.reg .v4 .b32 %a; ld.global.v4.b32 %a, [$1]; st.global.v4.b32 [$2], %a;}"

    @triton.jit
    def kernel(x, out, ASM: tl.constexpr):
        at = 4 * tl.arange(0, 32)
        tl.inline_asm_elementwise(ASM, "=r,l,l", [x + at, out + at], tl.int32, False, 1)

    _, out = launch(run, kernel, (1,), x, torch.zeros_like(x), ASM=asm, num_warps=1)
    assert torch.equal(out, x)


def test_packed_elements_share_a_register(run: Run) -> None:
    @triton.jit
    def kernel(x, out, BLOCK: tl.constexpr):
        at = tl.arange(0, BLOCK)
        found = tl.inline_asm_elementwise(
            "xor.b32 $0, $1, 0xff0000ff;", "=r,r", [tl.load(x + at)], tl.uint8, True, 4
        )
        tl.store(out + at, found)

    x = torch.arange(8, dtype=torch.uint8)
    _, out = launch(run, kernel, (1,), x, torch.zeros_like(x), BLOCK=8)
    assert out.tolist() == [255, 1, 2, 252, 251, 5, 6, 248]


@triton.jit
def _thread():
    return tl.inline_asm_elementwise("mov.u32 $0, %tid.x;", "=r", [], tl.uint32, True, 1)


@triton.jit
def adding(out, LIMIT: tl.constexpr, BLOCK: tl.constexpr):
    words = out + tl.arange(0, BLOCK)
    if _thread() < LIMIT:
        tl.inline_asm_elementwise(
            "red.relaxed.gpu.global.add.u32 [$1], 1; mov.b32 $0, 0;",
            "=r,l",
            [words],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@pytest.mark.parametrize(("limit", "wanted"), [(3, [1, 1, 1, 0]), (64, [16] * 4), (0, [0] * 4)])
def test_a_branch_on_tid_runs_for_its_threads(run: Run, limit: int, wanted: list[int]) -> None:
    """Thread t has element t mod 4, so 64 threads add 16 times to each."""
    out = torch.zeros(4, dtype=torch.int32)
    assert launch(run, adding, (1,), out, LIMIT=limit, BLOCK=4)[0].tolist() == wanted


@triton.jit
def in_a_branch(x, out, HOW: tl.constexpr, BLOCK: tl.constexpr):
    """Use each thread's own pointer, or a tile, in a branch of threads 1 and 2."""
    thread, at = _thread(), tl.arange(0, BLOCK)
    if thread < 3:  # noqa: SIM102 -- branches of threads, one in the other
        if thread > 0:
            if HOW == "copy":
                tl.store(out + thread, tl.load(x + thread))
            elif HOW == "masked":
                tl.store(out + thread, tl.load(x + thread, mask=thread < 9), mask=thread > 1)
            elif HOW == "tile":
                tl.store(out + at, 7)
            elif HOW == "add":
                tl.atomic_add(out + thread, 3)
            else:
                while tl.atomic_cas(out + thread, 0, 5) != 0:
                    pass


IN_A_BRANCH = {
    ("copy", 4): {1: 11, 2: 12},
    ("masked", 4): {2: 12},
    ("tile", 4): {1: 7, 2: 7},  # thread t has element t mod 4
    ("tile", 64): {1: 7, 2: 7, 33: 7, 34: 7},
    ("add", 4): {1: 3, 2: 3},
    ("swap", 4): {1: 5, 2: 5},
}


@pytest.mark.parametrize(("how", "block"), IN_A_BRANCH)
def test_what_triton_accesses_in_a_branch(run: Run, how: str, block: int) -> None:
    """Only the threads in it do, and x has no element for the others."""
    x, out = torch.tensor([10, 11, 12], dtype=torch.int32), torch.zeros(64, dtype=torch.int32)
    _, found = launch(run, in_a_branch, (1,), x, out, HOW=how, BLOCK=block, num_warps=1)
    wanted = IN_A_BRANCH[how, block]
    assert {at: value for at, value in enumerate(found.tolist()) if value} == wanted


@triton.jit
def taking_a_ticket(words, out, LAST: tl.constexpr):
    if _thread() < LAST:
        ticket = tl.inline_asm_elementwise(
            "atom.add.acq_rel.gpu.global.u32 $0, [$1], 1;", "=r,l", [words], tl.int32, False, 1
        )
        tl.store(out, ticket)


def test_thread_zero_stores_its_own_value(run: Run) -> None:
    words, out = torch.full((1,), 41, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    assert [x.item() for x in launch(run, taking_a_ticket, (1,), words, out, LAST=1)] == [42, 41]
    with pytest.raises(CannotInterpret, match="is stored to one address"):
        launch(run, taking_a_ticket, (1,), words, out, LAST=2)


def test_all_threads_make_an_atomic_on_a_scalar(run: Run) -> None:
    @triton.jit
    def kernel(out):
        tl.inline_asm_elementwise(
            "atom.global.add.u32 $0, [$1], 1;", "=r,l", [out], tl.int32, False, 1
        )

    out = torch.zeros(1, dtype=torch.int32)
    assert launch(run, kernel, (1,), out, num_warps=2)[0].tolist() == [64]


def test_values_per_thread_are_pointers_too(run: Run) -> None:
    @triton.jit
    def kernel(x, out):
        tid = _thread()
        mask = tid < 20
        tl.inline_asm_elementwise(
            """
            {
                .reg .pred %p;
                setp.eq.s32 %p, $2, 1;
                mov.b32 $0, 0;
                @%p ld.global.b32 $0, [$1 + 4];
                @%p st.global.b32 [$3], $0;
            }
            """,
            "=r,l,r,l",
            [x + tid, mask.to(tl.int32), out + tid],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
        tl.inline_asm_elementwise("bar.sync 0;", "=r", [], tl.int32, False, 1)

    x, out = torch.arange(32, dtype=torch.int32), torch.zeros(32, dtype=torch.int32)
    found = launch(run, kernel, (1,), x, out, num_warps=1)[1].tolist()
    assert found[:20] == list(range(1, 21))
    assert found[20:] == [0] * 12


def test_vector_loads_and_stores(run: Run) -> None:
    @triton.jit
    def kernel(x, out, BLOCK: tl.constexpr):
        at = tl.arange(0, BLOCK) * 4
        tl.inline_asm_elementwise(
            """
            {
                .reg .b32 %r<4>;
                ld.global.v4.b32 {%r0, %r1, %r2, %r3}, [$1];
                st.global.v4.b32 [$2], {%r3, %r2, %r1, %r0};
                mov.b32 $0, %r0;
            }
            """,
            "=r,l,l",
            [x + at, out + at],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )

    x = torch.arange(16, dtype=torch.int32)
    found = launch(run, kernel, (1,), x, torch.zeros_like(x), BLOCK=4)[1]
    assert torch.equal(found.view(4, 4), x.view(4, 4).flip(1))


@triton.jit
def on_pointers(x, out, ASM: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.inline_asm_elementwise(ASM, "=r,l,l", [x + at, out + at], tl.int32, False, 1)


ON_POINTERS = {  # x is 0 to 31, out 100: what it becomes, per thread
    "mov.u32 $0, %laneid; st.global.u32 [$2], $0;": lambda n: n,
    "{.reg .u64 %a<2>; .reg .pred %p; mov.u64 %a0, %globaltimer; ld.global.u32 $0, [$1];"
    " mov.u64 %a1, %globaltimer; setp.ge.u64 %p, %a1, %a0; selp.u32 $0, 1, 0, %p;"
    " st.global.u32 [$2], $0;}": lambda n: 1,
    "griddepcontrol.wait; ld.global.u32 $0, [$1]; griddepcontrol.launch_dependents;"
    " nanosleep.u32 20; st.global.u32 [$2], $0;": lambda n: n,
    "ld.relaxed.sys.global.u32 $0, [$1]; st.release.sys.global.u32 [$2], $0;": lambda n: n,
    "ld.acquire.gpu.global.u32 $0, [$1]; atom.acq_rel.sys.global.add.u32 $0, [$2], $0;": (
        lambda n: 100 + n
    ),
    "ld.volatile.global.u32 $0, [$1]; red.release.gpu.global.max.u32 [$2], 7;": lambda n: 100,
    "ld.mmio.relaxed.sys.global.u32 $0, [$1]; st.volatile.global.u32 [$2], $0;": lambda n: n,
    "mov.u32 $0, %ntid.x; membar.cta; membar.gl; st.global.u32 [$2], $0;": lambda n: 32,
    "global_load_dword $0, $1, off sc0 sc1\ns_waitcnt vmcnt(0)\ns_sleep 1\n"
    "global_store_dword $2, $0, off sc0 sc1": lambda n: n,
    "flat_load_dword $0, $1 sc1 ; of the device\ns_nop 0\n"
    "global_atomic_add $2, $0, off sc1": lambda n: 100 + n,
    "global_atomic_smax $0, $2, $1, off sc0 sc1\nglobal_store_dword $2, $0, off": lambda n: 100,
}


@pytest.mark.parametrize("asm", ON_POINTERS)
def test_special_registers_order_and_scope(run: Run, asm: str) -> None:
    x = torch.arange(32, dtype=torch.int32)
    out = torch.full_like(x, 100)
    found = launch(run, on_pointers, (1,), x, out, ASM=asm, BLOCK=32, num_warps=1)[1]
    assert found.tolist() == [ON_POINTERS[asm](n) for n in range(32)]


STOPPED = {
    "\nld.global.u32 $0, [$1+2];": "line 2: ld.global.u32 $0, [$1+2]: address 0x",
    "{.reg .b64 %a, %b; ld.global.v2.u64 {%a, %b}, [$1];}": "is not a multiple of 16: a GPU stops",
    "{.reg .pred p; .reg .u32 %t; mov.u32 %t, %tid.x; setp.eq.u32 p, %t, 3; @p trap;}": "it traps",
}


@pytest.mark.parametrize("asm", STOPPED)
def test_what_stops_a_gpu_is_named(run: Run, asm: str) -> None:
    x = torch.arange(32, dtype=torch.int32)
    with pytest.raises(KernelError) as caught:
        launch(run, on_pointers, (1,), x, x.clone(), ASM=asm, BLOCK=32, num_warps=1)
    assert STOPPED[asm] in str(caught.value)


REFUSED = {
    "s_mov_b32 $0, 1\nbuffer_load_dword $0, $1": "line 2: buffer_load_dword $0, $1: this instruct",
    "global_load_dwordx4 $0, $1, off": "line 1: global_load_dwordx4 $0, $1, off: expected one or t",
    "mma.sync.aligned $0, $1;": "line 1: mma.sync.aligned $0, $1: this instruction is not known",
    "\n\nmov.b32 $0, %undeclared;": "line 3: mov.b32 $0, %undeclared: register %undeclared is",
    "ld.shared.b32 $0, [$1];": "shared memory is the compiler's",
    "ld.param.b32 $0, [$1];": "param memory is the compiler's",
    "ld.global.b32 $0, [$1;": "line 1: ld.global.b32 $0, [$1: address [$1",
    "ld.global.b32 $0;": "line 1: ld.global.b32 $0: expected at least 2 operands, found 1",
    "mov.b32 $0, 1;\nmov.b32 $0, $7;": "line 2: mov.b32 $0, $7: the block has 3 results and argum",
    "fence.proxy.tensormap::generic.acquire.gpu [$1], 128;": "expected fence.proxy. with one of",
    "bra nowhere;": "there is no label 'nowhere'",
    "ld.global.foo.u32 $0, [$1];": "line 1: ld.global.foo.u32 $0, [$1]: .foo is not known",
    "red.async.relaxed.cluster.global.add.u32 [$1], $2;": ": .async is not known",
    "ld.release.sys.global.u32 $0, [$1];": ": ld has no .release: relaxed or acquire",
    "st.acquire.sys.global.u32 [$1], $2;": ": st has no .acquire: relaxed or release",
    "red.acq_rel.sys.global.add.u32 [$1], $2;": ": red has no .acq_rel: relaxed or release",
    "ld.acquire.global.u32 $0, [$1];": ": ld.acquire needs a scope: .cta, .gpu or .sys",
    "ld.global.v3.u32 {$0, $0, $0}, [$1];": ": .v3 is not known",
    "ld.global.v2.u32 $0, [$1];": ": 1 registers for 2 values",
    "st.global.v2.u32 [$1], {$2, $2, $2};": ": 3 registers for 2 values",
    "mov.u32 $0, %tid.x\nmov.u32 $0, 1;": "operand %tid.x",
    "cvt.u32.bogus $0, $1;": "line 1: cvt.u32.bogus $0, $1: this form of the instruction is not kn",
    "\nand.f32 $0, $1, $1;": "line 2: and.f32 $0, $1, $1: this form of the instruction is not kno",
    "mov.b64 $0, {$1, $1, $1};": "line 1: mov.b64 $0, {$1, $1, $1}: this form of the instruction",
    "mov.u32 $0, %ctaid.w;": "line 1: mov.u32 $0, %ctaid.w: this form of the instruction is not",
    "mul.wide.u64 $0, $1, $1;": "line 1: mul.wide.u64 $0, $1, $1: this form of the instruction is",
    "cvt.pred.u32 $0, $1;": "line 1: cvt.pred.u32 $0, $1: this form of the instruction is not kn",
    ".reg;": "line 1: .reg: this form of the instruction is not kno",
    "\ns_mov_b32 $0": "line 2: s_mov_b32 $0: this form of the instruction is not kno",
    "global_load_dword": "line 1: global_load_dword: this form of the instruction is not kno",
    "add.hi.s32 $0, $1, $1;": "line 1: add.hi.s32 $0, $1, $1: this instruction is not known",
    "bar.sync 0, 64;": "only a barrier of all threads is known: bar.sync 0",
    "bar.arrive 0, 128;": "only a barrier of all threads is known: bar.sync 0",
}


@pytest.mark.parametrize("asm", REFUSED)
def test_what_is_not_known_is_refused_with_its_line(run: Run, asm: str) -> None:
    with pytest.raises(CannotInterpret) as caught:
        computed(run, asm, X)
    assert REFUSED[asm] in str(caught.value)


def test_a_barrier_that_some_threads_never_reach(run: Run) -> None:
    @triton.jit
    def kernel(out):
        if _thread() == 0:
            tl.debug_barrier()
        tl.store(out, 1)

    with pytest.raises(KernelError, match="only some threads of the program take"):
        launch(run, kernel, (1,), torch.zeros(1, dtype=torch.int32))


def test_parser_knows_every_form() -> None:
    found = parse("/* two\n lines */ @!%p ld.global.u32 {%a, _}, [%b + 0x10]; // end\nend: ret;")
    load, last = found.instructions
    assert (load.line, load.guard, load.negated) == (2, "%p", True)
    assert load.operands == (
        (Register("%a"), Register("_")),
        Address(Register("%b"), 16),
    )
    assert (last.line, found.labels) == (3, {"end": 1})
    assert parse("mov.f32 %a, 0f3F800000;").instructions[0].operands[1] == Immediate(1.0, 32)


@triton.jit
def builtins_kernel(x, n, LIMIT: tl.constexpr):
    value = imported_load(x)
    tl.store(x, min(value, LIMIT))
    tl.store(x + 1, max(n, value))
    tl.store(x + 2, min(LIMIT, 4))
    tl.store(x + 3, imported_rsqrt(value * 1.0).to(tl.int32))


def test_min_and_max_are_the_compilers_and_names_may_be_imported(run: Run) -> None:
    x = torch.tensor([1, 0, 0, 7], dtype=torch.int32)
    assert launch(run, builtins_kernel, (1,), x, 9, LIMIT=3)[0].tolist() == [1, 9, 3, 1]
    x = torch.tensor([8, 0, 0, 7], dtype=torch.int32)
    assert launch(run, builtins_kernel, (1,), x, 5, LIMIT=3)[0].tolist() == [3, 8, 3, 0]


def test_a_text_joined_from_literals_and_names_has_its_lines(tmp_path: Path) -> None:
    path = tmp_path / "joined.py"
    path.write_text(
        'f(\n  0)\nx = tl.inline_asm_elementwise("""\n a;\n """ + OP + """ b;\n c;""", "")\n'
    )
    assert _literal_lines(str(path), 3, 3) == [3, 4, 5, 6]
    assert _literal_lines(str(path), 3, 2) == []  # OP had a line break of its own
    assert _literal_lines(str(path), 1, 3) == []
