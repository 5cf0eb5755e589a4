"""Which entry of a Helion config acts on what: block ids, symbols, and memory operations.

    block id 0  <->  symbol u1  <->  config["block_sizes"][0]
    load `q`    <->  config["indexing"][0], config["load_eviction_policies"][0]

Helion counts loads and stores while it generates code, so the slots here follow the order of code
generation for a config that rolls no reduction; a rolled one counts its own loops instead.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.fx import Node

from .device_regions import Call, target_name
from .node_values import encode, sym_expr, warn_once

_LOAD = "helion.language.memory_ops:load"
_STORE = "helion.language.memory_ops:store"
_ATOMIC = "helion.language.atomic_ops:atomic_"
_TILE_INDEX = "helion.language.tile_ops:tile_index"


def block_map(env: Any) -> list[dict[str, Any]] | None:
    """One entry per block id of the compile environment; None without one, or if it changed."""
    try:
        env = env if env is not None else _active_env()
        return None if env is None else [_block(env, info) for info in env.block_sizes]
    except Exception as error:
        warn_once(f"no block map in the IR record: {type(error).__name__}: {error}")
        return None


def _active_env() -> Any:
    from helion._compiler.compile_environment import CompileEnvironment

    return CompileEnvironment.current() if CompileEnvironment.has_current() else None


def _block(env: Any, info: Any) -> dict[str, Any]:
    size = info.size if isinstance(info.size, (int, torch.SymInt)) else None
    source = info.block_size_source
    fixed = getattr(source, "value", None)
    return {
        "block_id": info.block_id,
        "symbol": str(sym_expr(info.var)),
        "size": None if size is None else str(size),
        "concrete_size": size if isinstance(size, int) else None,
        "reduction": bool(info.reduction),
        "source": type(source).__name__,
        "fixed": encode(fixed),
        "debug_names": sorted(info.debug_names),
        "config_slots": _slots_of(env.config_spec, info.block_id),
    }


def _slots_of(config_spec: Any, block_id: int) -> dict[str, int]:
    """Config key -> index in that key's list, for every list that has an item for this block."""
    from helion.autotuner.block_id_sequence import BlockIdSequence

    slots = {}
    for key, sequence in sorted(vars(config_spec).items()):
        if isinstance(sequence, BlockIdSequence):
            at = [i for i, item in enumerate(sequence) if block_id in item.block_ids]
            if at:
                slots[key] = at[0]
    return slots


def symbol_map(device_ir: Any) -> list[dict[str, Any]]:
    """Where every symbol of the shapes comes from: a block size, a tensor's size, an argument."""
    host = getattr(device_ir, "host_function", None)
    entries = []
    for expr, info in (getattr(host, "expr_to_origin", None) or {}).items():
        try:
            origin = info.origin
            block_id = getattr(origin, "block_id", None)
            text = origin.host_str() if origin.is_host() and block_id is None else None
        except Exception as error:
            warn_once(f"no origin of a symbol: {type(error).__name__}: {error}")
            continue
        kind = type(origin).__name__
        entry = {"symbol": str(expr), "origin": kind, "block_id": block_id, "host": text}
        entries.append(entry)
    return sorted(entries, key=lambda e: (e["symbol"], e["origin"]))


def memory_slots(
    graphs: dict[int, Any], root_ids: list[int], calls: dict[int, list[Call]]
) -> dict[Node, dict[str, list[int]]]:
    """Memory operation -> config key -> the slots that it takes, in code generation order."""
    slots: dict[Node, dict[str, list[int]]] = {}
    counts: Counter[str] = Counter()

    def walk(graph_id: int, above: tuple[int, ...]) -> None:
        for node in graphs[graph_id].graph.nodes:
            for key in _keys(node):
                slots.setdefault(node, {}).setdefault(key, []).append(counts[key])
                counts[key] += 1
            children = [c for c in calls.get(graph_id, []) if c.node is node]
            for child in _generated(children):
                if child not in above:
                    walk(child, (*above, child))

    for root in root_ids:
        if root in graphs:
            walk(root, (root,))
    return slots


def _generated(children: list[Call]) -> list[int]:
    """The order in which Helion generates the children; a loop's condition is generated twice."""
    order = [c.child.graph_id for c in children]
    return order + [c.child.graph_id for c in children if c.role == "cond"]


def _keys(node: Node) -> list[str]:
    name = target_name(node) if node.op == "call_function" else None
    if name == _LOAD:
        source = node.args[0] if node.args else None
        given = node.args[3] if len(node.args) > 3 else node.kwargs.get("eviction_policy")
        keys = [] if given is not None else ["load_eviction_policies"]
        indexed = isinstance(source, Node) and target_name(source) != _TILE_INDEX
        return keys + ["indexing"] if indexed else keys
    if name == _STORE:
        return ["indexing"]
    return ["atomic_indexing"] if name is not None and name.startswith(_ATOMIC) else []
