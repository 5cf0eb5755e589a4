"""A rank that leaves its world with an exception does not keep the others waiting."""

from __future__ import annotations

import time

import pytest

import sundog


@pytest.mark.parametrize("size", [2, 3])
def test_an_exception_inside_with(run, size):
    def main(world: sundog.World) -> None:
        with world:
            world.barrier()
            if world.rank == 1:
                raise KeyError("rank 1 leaves")
            world.barrier()

    begin = time.monotonic()
    with pytest.raises(KeyError, match="rank 1 leaves"):
        run(main, size)
    assert time.monotonic() - begin < 10, "not a timeout later"
