"""What is traced: an op, or one algorithm of it, on one problem, as a call would run it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from ... import target
from ...ops.op import OPS, algorithms
from ...ops.select import choose, config_for
from ...world.world import World
from .._subject import room
from ..tune.space import problem_of

__all__ = ["Subject"]


@dataclass(frozen=True)
class Subject:
    """`name`: all_gather, all_gather.push or a module's path. `problem`: m=4096,... or ''."""

    name: str
    problem: str = ""

    def call(self, world: World) -> tuple[str, Callable[[], Any]]:
        """Plan it: a title, and one call on random inputs. A collective on the host."""
        problem = self._problem(world.size)
        name, module, config = self._choose(world, problem)
        plan = module.plan(world, problem, config)
        inputs = module.inputs(world, problem, 0)
        out = room(world, module, problem, inputs)
        world.barrier()
        return f"{name} {_text(problem)}", lambda: plan(*inputs, out)

    def _problem(self, size: int) -> Any:
        """Without a word about it: the largest of the op's cases."""
        module = next(iter(algorithms(self.name).values()))
        if self.problem:
            return problem_of(module, self.problem, size)
        return max(module.cases(size), key=lambda each: module.cost(each).hbm_bytes)

    def _choose(self, world: World, problem: Any) -> tuple[str, ModuleType, Any]:
        """The algorithm that is named, or the one that a call would choose here; its config."""
        kind = target.of(world.device).key if world.device.type == "cuda" else "the simulator"
        modules = algorithms(self.name)
        if self.name in OPS or "" in modules:
            [module] = modules.values()
            config = config_for(self.name, module, problem, kind, world.num_sms)
            return self.name, module, config
        choice = choose(self.name, problem, kind, world.num_sms, backend=world.backend)
        return f"{self.name}.{choice.algo}", modules[choice.algo], choice.config


def _text(problem: Any) -> str:
    """Its fields, without the world's size and those that are as they are by default."""
    shown = [
        f"{field.name}={getattr(problem, field.name)}".replace("torch.", "")
        for field in dataclasses.fields(problem)
        if field.name != "size" and getattr(problem, field.name) != field.default
    ]
    return ",".join(shown)
