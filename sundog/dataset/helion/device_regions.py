"""Connect the graphs of Helion's device IR: calls, arguments, results, and the config's slots.

Five control-flow operations and the two that take a combine function carry child graph ids as
plain integers. From them come four kinds of edges beside `data`:

    region   outer argument -> placeholder of the child
    call     call node      -> first node of the child
    result   output of the child -> the node that reads it in the parent
    carried  output of the child -> the placeholder that is this value in the next iteration

A config's lists are matched to block ids and memory operations: block id 0 <-> symbol u1 <->
config["block_sizes"][0]. Nothing here raises: what looks unexpected causes one warning.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple, TypeGuard

import torch
from torch.fx import Graph, Node

from .node_values import encode, encode_target, sym_expr, warn_once

# The concrete GraphInfo classes of helion 1.5.1. A test compares them with the installed ones.
KNOWN_REGION_KINDS = frozenset(
    {
        "RootGraphInfo",
        "ForLoopGraphInfo",
        "ReductionLoopGraphInfo",
        "IfGraphInfo",
        "ElseGraphInfo",
        "WhileConditionGraphInfo",
        "WhileLoopGraphInfo",
        "HelperFunctionGraphInfo",
        "MPPGraphInfo",
        "_PromotedGridAxisGraphInfo",
    }
)

_TRACING = "helion.language._tracing_ops:"
_GETITEM = "_operator:getitem"
_PHI = _TRACING + "_phi"

# target -> (role, slot of the child graph id, slot of the arguments) per child
_CALLS: dict[str, tuple[tuple[str, int, int], ...]] = {
    _TRACING + "_for_loop": (("body", 0, 3),),
    _TRACING + "_for_loop_step": (("body", 0, 3),),
    _TRACING + "_if": (("if", 1, 3), ("else", 2, 4)),
    _TRACING + "_while_loop": (("cond", 0, 2), ("body", 1, 2)),
    "helion.language.scan_ops:_associative_scan": (("combine", 0, 1),),
    "helion.language.reduce_ops:_reduce": (("combine", 0, 1),),
}


class RegionCall(NamedTuple):
    """One child graph of one call node."""

    node: Node
    role: str  # body, cond, if, else, combine
    id_slot: int
    child: Any  # GraphInfo
    inputs: tuple[tuple[Node, tuple[int | str, ...], int], ...]  # (outer, path, placeholder)
    if_info: Any = None  # of an `_if`: where Helion keeps what both branches return


class RegionLink(NamedTuple):
    """One edge between graphs, before it is written."""

    kind: str
    source: Node
    target: Node
    call: RegionCall
    arg_positions: tuple[int | str, ...] | None = None
    output_index: int | None = None
    exact: bool | None = None
    value: Node | None = None  # whose dtype and shape the edge carries


def is_graph_id(value: object) -> TypeGuard[int]:
    """Tell a graph id from True and False, which are integers in Python."""
    return type(value) is int


def target_name(node: Node) -> str | None:
    return encode_target(node.target) if callable(node.target) else node.target


def calls_of(node: Node, graphs: dict[int, Any]) -> list[RegionCall]:
    """Return the child graphs that `node` calls; [] and one warning if it is malformed."""
    if node.op != "call_function" or (name := target_name(node)) not in _CALLS:
        return []
    calls = [_call(node, role, at, args, graphs) for role, at, args in _CALLS[name]]
    found = [call for call in calls if call is not None]
    if len(found) < len(calls):
        warn_once(f"malformed control-flow node {name}: its region edges are left out")
    return found


def _call(
    node: Node, role: str, id_slot: int, arg_slot: int, graphs: dict[int, Any]
) -> RegionCall | None:
    args: tuple[Any, ...] = node.args
    if len(args) <= max(id_slot, arg_slot) or not is_graph_id(args[id_slot]):
        return None
    child, given = graphs.get(args[id_slot]), args[arg_slot]
    if child is None or not isinstance(given, (list, tuple, Node)):
        return None
    values: list[tuple[Any, tuple[int | str, ...]]] = [(given, (arg_slot,))]
    if not isinstance(given, Node):
        values = [(v, (arg_slot, i)) for i, v in enumerate(given)]
    expected = len(placeholders(child.graph))
    # A combine function gets every value twice: accumulated (left), then new (right).
    copies = 2 if role == "combine" else 1
    if expected != copies * len(values):
        return None
    inputs = [
        (value, path, i + copy * len(values))
        for copy in range(copies)
        for i, (value, path) in enumerate(values)
        if isinstance(value, Node)
    ]
    if_info = graphs.get(args[1]) if role in ("if", "else") else None
    return RegionCall(node, role, id_slot, child, tuple(inputs), if_info)


def placeholders(graph: Graph) -> list[Node]:
    return [node for node in graph.nodes if node.op == "placeholder"]


def output_of(graph: Graph) -> Node | None:
    return next((node for node in reversed(graph.nodes) if node.op == "output"), None)


def _returned(graph: Graph) -> list[Any]:
    """Return the values that a graph returns, in order."""
    node = output_of(graph)
    value = node.args[0] if node is not None and node.args else None
    return list(value) if isinstance(value, (list, tuple)) else [value]


def live_graphs(graphs: dict[int, Any], root_ids: list[int]) -> dict[int, list[RegionCall]]:
    """Graph id -> its calls, for every graph that a root reaches; the others never run."""
    live: dict[int, list[RegionCall]] = {}
    waiting = [i for i in root_ids if i in graphs]
    while waiting:
        graph_id = waiting.pop()
        if graph_id in live:
            continue
        nodes = graphs[graph_id].graph.nodes
        live[graph_id] = [call for node in nodes for call in calls_of(node, graphs)]
        waiting += [call.child.graph_id for call in live[graph_id]]
    return live


def links_of(calls: list[RegionCall]) -> Iterator[RegionLink]:
    """Yield every edge that the calls of one graph make."""
    for call in calls:
        slots = placeholders(call.child.graph)
        first = next(iter(call.child.graph.nodes), None)
        if first is not None:
            yield RegionLink("call", call.node, first, call, arg_positions=(call.id_slot,))
        for outer, path, index in call.inputs:
            yield RegionLink("region", outer, slots[index], call, arg_positions=path, value=outer)
        yield from _results(call)
        if call.role in ("body", "combine"):
            siblings = [c for c in calls if c.node is call.node and c.role in ("cond", call.role)]
            yield from _carried(call, siblings)


def _results(call: RegionCall) -> Iterator[RegionLink]:
    output, returned = output_of(call.child.graph), _returned(call.child.graph)
    if output is None:
        return
    reads = [(u, u.args[1]) for u in call.node.users if target_name(u) == _GETITEM]
    if call.role == "cond" or not reads:  # decides inside the call, or the call is the value
        if call.role in ("cond", "combine"):
            yield RegionLink(
                "result", output, call.node, call, output_index=0, value=_node(returned, 0)
            )
        return
    for user, index in reads:
        at: Any = _branch_output(call, index) if call.role in ("if", "else") else index
        if isinstance(at, Node):  # the branch leaves this variable as it was
            yield RegionLink("result", at, user, call, value=at)
        elif is_graph_id(at) and 0 <= at < len(returned):
            yield RegionLink(
                "result", output, user, call, output_index=at, value=_node(returned, at)
            )


def _node(values: list[Any], index: int) -> Node | None:
    value = values[index] if index < len(values) else None
    return value if isinstance(value, Node) else None


def _branch_output(call: RegionCall, index: Any) -> Any:
    """Find what result `index` of an `_if` is in this branch: an output, an outer node, or None.

    The results are those of the if branch, then those of the else branch; Helion notes per
    result an output number, or the name of a variable that the branch does not assign.
    """
    pairs = getattr(call.if_info, "branches_outputs", None) or []
    side = 0 if call.role == "if" else 1
    if not is_graph_id(index) or not side * len(pairs) <= index < (side + 1) * len(pairs):
        return None
    found = pairs[index - side * len(pairs)][side]
    if not isinstance(found, str):
        return found
    outer: dict[str, Any] = {}
    for names, slot in (("if_arg_names", 3), ("else_arg_names", 4)):
        given: Any = call.node.args[slot]
        outer.update(zip(getattr(call.if_info, names, None) or [], given, strict=False))
    return outer.get(found)


def _carried(call: RegionCall, siblings: list[RegionCall]) -> Iterator[RegionLink]:
    """Find loop-carried values: `_phi(initial, result i)` names the argument of output i."""
    output, returned = output_of(call.child.graph), _returned(call.child.graph)
    if output is None:
        return
    for index, place, exact in _renewed(call, len(returned)):
        for sibling in siblings:
            target = placeholders(sibling.child.graph)[place]
            value = _node(returned, index)
            yield RegionLink("carried", output, target, sibling, None, index, exact, value)


def _renewed(call: RegionCall, outputs: int) -> Iterator[tuple[int, int, bool]]:
    """(output, placeholder, whether it is the only one that it can be)."""
    if call.role == "combine":
        yield from ((i, i, True) for i in range(outputs))
        return
    initial: dict[int, Any] = {}
    for read in call.node.users:
        if target_name(read) == _GETITEM and is_graph_id(index := read.args[1]):
            for phi in read.users:
                if target_name(phi) == _PHI and phi.args[1] is read:
                    initial[index] = phi.args[0]
    taken: set[int] = set()
    for index in sorted(initial):
        places = [p for outer, _, p in call.inputs if outer is initial[index]]
        free = [p for p in places if p not in taken]
        if free:
            # Outputs come in the order of the arguments; two variables that start from one
            # node cannot always be distinguished, which `exact` says.
            taken.add(free[0])
            yield index, free[0], len(places) == 1


_LOAD = "helion.language.memory_ops:load"
_STORE = "helion.language.memory_ops:store"
_ATOMIC = "helion.language.atomic_ops:atomic_"
_TILE_INDEX = "helion.language.tile_ops:tile_index"


def block_map(env: Any) -> list[dict[str, Any]] | None:
    """Describe each block id of the compile environment; None without one, or if it changed."""
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
    """List what each symbol of the shapes is: a block size, a tensor's size, an argument."""
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
    graphs: dict[int, Any], root_ids: list[int], calls: dict[int, list[RegionCall]]
) -> dict[Node, dict[str, list[int]]]:
    """Map memory operation and config key to the slots that it takes, in code generation order."""
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


def _generated(children: list[RegionCall]) -> list[int]:
    """Return the order in which Helion generates the children; a loop's condition comes twice."""
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
