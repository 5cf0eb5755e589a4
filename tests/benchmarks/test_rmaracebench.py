"""Programs in C become kernels: each statement that RMARaceBench uses, in programs of our own."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.suites import rmaracebench
from benchmarks.suites.c_programs import read_program
from benchmarks.suites.verdicts import Verdict, judge

HEAD = """// RACE LABELS BEGIN
/*
{ "RACE_KIND": "none", %s "NPROCS": 2, "DESCRIPTION": "ours" }
*/
#include <shmem.h>
#define SIZE 2
%s
int main(int argc, char** argv)
{
    static int there = 0;
    static uint64_t flag = 0;
    static long lock;
    int here = 1;
    shmem_init();
    int my_pe = shmem_my_pe();
    int num_pe = shmem_n_pes();
    if (num_pe != SIZE) { shmem_global_exit(1); }
    shmem_barrier_all();
"""
TAIL = """
    shmem_barrier_all();
    printf("%d %d", my_pe, there);
    shmem_finalize();
    return 0;
}
"""


def _judge(tmp_path: Path, body: str, functions: str = "") -> Verdict:
    """Write a program; the lines that race have the comment RACE."""
    text = HEAD % ("PAIR", functions) + body + TAIL
    marked = [i for i, line in enumerate(text.splitlines(), 1) if "RACE;" in line]
    pair = f'"RACE_PAIR": ["a@{marked[0]}", "b@{marked[1]}"],' if marked else ""
    folder = tmp_path / "SHMEM" / "ours"
    folder.mkdir(parents=True)
    (folder / "case.c").write_text(text.replace("PAIR", pair, 1))
    (case,) = rmaracebench.cases(tmp_path)
    return judge(case)


NESTED = """
void inner(int* a, int* b) { shmem_int_get_nbi(b, a, 1, 1); } // RACE;
int* same(int** x) { return *x; }
void outer(int* a, int* b) { inner(a, b); }
"""
FOLLOWED = """
    int* p = &there; int* q; int* r;
    q = same(&p);
    memcpy(&r, &q, sizeof(int*));
    void (*f)(int* a, int* b);
    f = outer;
    if (my_pe == 0) {
        (*f)(r, &here);
        printf("%d", here); // RACE;
    }
"""
PARALLEL = """
    if (my_pe == 0) {
#pragma omp parallel num_threads(2)
        {
%s
        }
    }
"""
TASK = """
#pragma omp single
            {
#pragma omp task shared(flag)
                { shmem_int_get_nbi(&here, &there, 1, 1); MARK
                  shmem_quiet(); }
%s
                printf("%%d", here); MARK
            }
"""
BODIES = {
    "a put and a load": "if (my_pe == 0) { shmem_int_put(&there, &here, 1, 1); // RACE;\n }"
    ' else { printf("%d", there); // RACE;\n }',
    "a quiet and a sync": "if (my_pe == 0) { shmem_int_p(&there, 4, 1); }\n shmem_quiet();"
    " shmem_sync_all(); if (my_pe == 1) { here = there; }",
    "a lock": "shmem_set_lock(&lock); shmem_int_put(&there, &here, 1, 1); shmem_clear_lock(&lock);",
    "a signal that is fetched": "if (my_pe == 0) { shmem_int_put_signal(&there, &here, 1, &flag, 1,"
    " SHMEM_SIGNAL_ADD, 1); } else { while (shmem_signal_fetch(&flag) != 1) { continue; }"
    " there = 2; }",
    "a signal that is loaded": "if (my_pe == 0) {\n shmem_int_put_signal(&there, &here, 1, &flag,"
    " 1, SHMEM_SIGNAL_ADD, 1); // RACE;\n } else {\n while (flag < SIZE - 1) // RACE;\n {}\n }",
    "a context's own quiet": "shmem_ctx_t c; shmem_ctx_create(0, &c); if (my_pe == 0) {\n"
    "shmem_ctx_int_put(c, &there, &here, 1, 1); // RACE;\n shmem_quiet();\n"
    "shmem_ctx_int_put(c, &there, &here, 1, 1); // RACE;\n }",
    "atomics": "here = shmem_int_atomic_fetch_inc(&there, 0); shmem_int_atomic_add(&there, 1, 0);",
    "a team of one": "shmem_team_t t = SHMEM_TEAM_INVALID; shmem_team_split_strided("
    "SHMEM_TEAM_WORLD, 0, 2, num_pe / 2, NULL, 0lu, &t);"
    " if (SHMEM_TEAM_INVALID != t) shmem_team_sync(t);",
    "threads that meet": PARALLEL % "#pragma omp master\n{ here = 3; }\n#pragma omp barrier\n"
    'printf("%d", here);',
    "threads that do not": PARALLEL % "#pragma omp master\n{\n here = 3; // RACE;\n}\n"
    'printf("%d", here); // RACE;',
    "sections": PARALLEL % "#pragma omp sections\n{\n#pragma omp section\nhere = 3; // RACE;\n"
    '#pragma omp section\nprintf("%d", here); // RACE;\n}',
    "a loop in order": PARALLEL % "#pragma omp for ordered\nfor (int i = 0; i < 2; ++i) {\n"
    "#pragma omp ordered\nif (i == 0) { here = 3; } else { there = here; }\n}",
    "a task": PARALLEL % (TASK % "").replace("MARK", "// RACE;"),
    "a task that is waited for": PARALLEL % (TASK % "#pragma omp taskwait").replace("MARK", ""),
}


@pytest.mark.parametrize("name", BODIES)
def test_a_program_is_judged_as_its_label_says(tmp_path: Path, name: str) -> None:
    verdict = _judge(tmp_path, BODIES[name])
    assert (verdict.found, verdict.kind) == (verdict.expected, "agrees"), verdict


def test_functions_and_pointers_are_followed(tmp_path: Path) -> None:
    assert _judge(tmp_path, FOLLOWED, NESTED).kind == "agrees"


def test_a_wrong_label_differs(tmp_path: Path) -> None:
    verdict = _judge(tmp_path, "there = 1; // RACE;\nhere = 2; // RACE;")
    assert (verdict.found, verdict.kind) == ("no race", "differs")


def test_what_is_not_known_is_not_expressible(tmp_path: Path) -> None:
    verdict = _judge(tmp_path, "shmem_int_alltoall(&there, &here, 1);")
    assert (verdict.kind, verdict.reason) == (
        "not expressible",
        "shmem_alltoall: not a call that is written here",
    )


def test_operators_bind_as_in_c() -> None:
    functions = read_program("int main() { while (a < B - 1) { continue; } }", {})
    condition = functions["main"].body.parts[0].parts[0]
    assert condition == (
        "binary",
        "<",
        ("name", "a"),
        ("binary", "-", ("name", "B"), ("number", 1)),
    )
