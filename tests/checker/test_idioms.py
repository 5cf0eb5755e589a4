"""The idiom and the smallest repair, by the instruction that signals and the one that waits."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest

import sundog
from sundog.checker.findings import AccessEvent
from sundog.checker.idioms import chain, idiom, wider

SHMEM = os.path.join(os.path.dirname(sundog.__file__), "compat", "shmem.py")
STREAM = os.path.join(os.path.dirname(sundog.__file__), "compat", "stream_kernels.py")


def event(name: str, sem: str = "relaxed", scope: str = "sys", line: int = 7, **more: Any) -> Any:
    stack = more.pop("stack", (("kernel.py", line, name),))
    verb = more.pop("verb", "atomic CAS")
    actor = SimpleNamespace(rank=more.pop("rank", 0))
    return AccessEvent(actor, verb, True, more.pop("atomic", True), False, sem, scope, stack=stack)


WAIT = event("ld.acquire.sys.global.u32", "acquire", line=9, rank=1)


@pytest.mark.parametrize(
    ("signal", "lacks", "repair"),
    [
        ("st.relaxed.sys.global.u32", "release", "st.release.sys.global.u32 at kernel.py:7"),
        ("red.global.add.u32", "release", "red.release.sys.global.add.u32 at kernel.py:7"),
        ("atom.global.relaxed.gpu.cas.b32", "release", "atom.global.release.gpu.cas.b32 at kern"),
        ("st.release.sys.global.u32", "barrier before", "a CTA barrier before kernel.py:7"),
        ("st.release.sys.global.u32", "barrier after", "a CTA barrier after kernel.py:9"),
        ("kernel", "release", 'sem="release" at kernel.py:7'),
    ],
)
def test_the_weak_side_is_named_with_its_repair(signal: str, lacks: str, repair: str) -> None:
    found = idiom(event(signal), WAIT, lacks)
    assert f"Smallest repair: {repair}" in found
    name = signal if "." in signal else "relaxed atomic CAS"
    assert f"Idiom: {name} signals, then ld.acquire.sys.global.u32 waits" in found


def test_a_wait_without_acquire() -> None:
    signal = event("st.release.sys.global.u32", "release")
    volatile = event("ld.volatile.global.u32")
    assert "repair: ld.acquire.sys.global.u32 at kernel.py:7" in idiom(signal, volatile, "acquire")
    plain = event("kernel", "", "", verb="load", atomic=False)
    wanted = 'repair: an atomic with sem="acquire", scope="sys" at kernel.py:7'
    assert wanted in idiom(signal, plain, "acquire")
    volatile = event("kernel", verb="volatile load")
    assert wanted in idiom(signal, volatile, "acquire")
    assert "repair" not in idiom(signal, WAIT, "")


def test_an_atomic_that_signals_and_waits_does_both() -> None:
    counter = event("kernel", "release", verb="atomic ADD")
    assert 'repair: sem="acq_rel" at kernel.py:7' in idiom(counter, counter, "acquire")
    counter = event("atom.release.sys.global.add.u32", "release")
    wanted = "repair: atom.acq_rel.sys.global.add.u32 at kernel.py:7"
    assert wanted in idiom(counter, counter, "acquire")


def test_scopes_are_widened_where_they_are_too_narrow() -> None:
    narrow = event("red.release.gpu.global.add.u32", "release", "gpu")
    assert wider(narrow, WAIT).endswith("red.release.sys.global.add.u32 at kernel.py:7")
    default = event("red.global.add.u32", "relaxed", "gpu")
    assert wider(default, WAIT).endswith("red.relaxed.sys.global.add.u32 at kernel.py:7")
    triton = event("kernel", "acq_rel", "gpu", line=3, rank=1)
    both = 'scope="sys" at kernel.py:7, and scope="sys" at kernel.py:3'
    assert wider(event("kernel", scope="gpu"), triton).endswith(both)


def test_programs_of_one_rank_need_no_more_than_its_gpu() -> None:
    alone, serving = event("kernel", scope="cta"), event("kernel", "acquire", "gpu", line=9)
    assert wider(serving, alone).endswith('Smallest repair: scope="gpu" at kernel.py:7')
    alone = event("atom.release.cta.global.add.u32", "release", "cta")
    assert wider(serving, alone).endswith("atom.release.gpu.global.add.u32 at kernel.py:7")


def test_what_a_stand_in_does_is_repaired_by_its_caller() -> None:
    stack = ((SHMEM, 222, "st.relaxed.sys.global.b64"), ("theirs.py", 5, "push"))
    found = idiom(event("", stack=stack), WAIT, "release")
    assert found.endswith("Smallest repair: a fence before theirs.py:5")
    stream = event("", "release", stack=((STREAM, 44, "write_value"),))
    assert "Idiom: write_value of a stream signals" in idiom(stream, WAIT, "")


def test_a_chain_of_calls_names_each_line_once() -> None:
    stack = (("a.py", 3, "x"), ("a.py", 3, "wait"), ("a.py", 8, "meet"), ("b.py", 2, "kernel"))
    assert chain(event("", stack=stack)) == "a.py:3 (called from :8, from b.py:2)"
