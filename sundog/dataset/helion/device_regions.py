"""How the graphs of Helion's device IR are connected: who calls whom, with what, and what returns.

Five control-flow operations and the two that take a combine function carry child graph ids as
plain integers. From them come four kinds of edges beside `data`:

    region   outer argument -> placeholder of the child
    call     call node      -> first node of the child
    result   output of the child -> the node that reads it in the parent
    carried  output of the child -> the placeholder that is this value in the next iteration

A call that does not look as expected is reported once and gets no edges; nothing here raises.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, TypeGuard

from torch.fx import Graph, Node

from .node_values import encode_target, warn_once

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


class Call(NamedTuple):
    """One child graph of one call node."""

    node: Node
    role: str  # body, cond, if, else, combine
    id_slot: int
    child: Any  # GraphInfo
    inputs: tuple[tuple[Node, tuple[int | str, ...], int], ...]  # (outer, path, placeholder)
    if_info: Any = None  # of an `_if`: where Helion keeps what both branches return


class Link(NamedTuple):
    """One edge between graphs, before it is written."""

    kind: str
    source: Node
    target: Node
    call: Call
    arg_positions: tuple[int | str, ...] | None = None
    output_index: int | None = None
    exact: bool | None = None
    value: Node | None = None  # whose dtype and shape the edge carries


def is_graph_id(value: object) -> TypeGuard[int]:
    """True and False are integers in Python, but not graph ids."""
    return type(value) is int


def target_name(node: Node) -> str | None:
    return encode_target(node.target) if callable(node.target) else node.target


def calls_of(node: Node, graphs: dict[int, Any]) -> list[Call]:
    """The child graphs that `node` calls; [] and one warning if it is malformed."""
    if node.op != "call_function" or (name := target_name(node)) not in _CALLS:
        return []
    calls = [_call(node, role, at, args, graphs) for role, at, args in _CALLS[name]]
    found = [call for call in calls if call is not None]
    if len(found) < len(calls):
        warn_once(f"malformed control-flow node {name}: its region edges are left out")
    return found


def _call(
    node: Node, role: str, id_slot: int, arg_slot: int, graphs: dict[int, Any]
) -> Call | None:
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
    return Call(node, role, id_slot, child, tuple(inputs), if_info)


def placeholders(graph: Graph) -> list[Node]:
    return [node for node in graph.nodes if node.op == "placeholder"]


def output_of(graph: Graph) -> Node | None:
    return next((node for node in reversed(graph.nodes) if node.op == "output"), None)


def _returned(graph: Graph) -> list[Any]:
    """The values a graph returns, in order."""
    node = output_of(graph)
    value = node.args[0] if node is not None and node.args else None
    return list(value) if isinstance(value, (list, tuple)) else [value]


def live_graphs(graphs: dict[int, Any], root_ids: list[int]) -> dict[int, list[Call]]:
    """Graph id -> its calls, for every graph that a root reaches; the others never run."""
    live: dict[int, list[Call]] = {}
    waiting = [i for i in root_ids if i in graphs]
    while waiting:
        graph_id = waiting.pop()
        if graph_id in live:
            continue
        nodes = graphs[graph_id].graph.nodes
        live[graph_id] = [call for node in nodes for call in calls_of(node, graphs)]
        waiting += [call.child.graph_id for call in live[graph_id]]
    return live


def links_of(calls: list[Call]) -> Iterator[Link]:
    """Every edge that the calls of one graph make."""
    for call in calls:
        slots = placeholders(call.child.graph)
        first = next(iter(call.child.graph.nodes), None)
        if first is not None:
            yield Link("call", call.node, first, call, arg_positions=(call.id_slot,))
        for outer, path, index in call.inputs:
            yield Link("region", outer, slots[index], call, arg_positions=path, value=outer)
        yield from _results(call)
        if call.role in ("body", "combine"):
            siblings = [c for c in calls if c.node is call.node and c.role in ("cond", call.role)]
            yield from _carried(call, siblings)


def _results(call: Call) -> Iterator[Link]:
    output, returned = output_of(call.child.graph), _returned(call.child.graph)
    if output is None:
        return
    reads = [(u, u.args[1]) for u in call.node.users if target_name(u) == _GETITEM]
    if call.role == "cond" or not reads:  # decides inside the call, or the call is the value
        if call.role in ("cond", "combine"):
            yield Link("result", output, call.node, call, output_index=0, value=_node(returned, 0))
        return
    for user, index in reads:
        at: Any = _branch_output(call, index) if call.role in ("if", "else") else index
        if isinstance(at, Node):  # the branch leaves this variable as it was
            yield Link("result", at, user, call, value=at)
        elif is_graph_id(at) and 0 <= at < len(returned):
            yield Link("result", output, user, call, output_index=at, value=_node(returned, at))


def _node(values: list[Any], index: int) -> Node | None:
    value = values[index] if index < len(values) else None
    return value if isinstance(value, Node) else None


def _branch_output(call: Call, index: Any) -> Any:
    """What result `index` of an `_if` is in this branch: an output, an outer node, or None.

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


def _carried(call: Call, siblings: list[Call]) -> Iterator[Link]:
    """Loop-carried values: `_phi(initial, result i)` names the argument that output i renews."""
    output, returned = output_of(call.child.graph), _returned(call.child.graph)
    if output is None:
        return
    for index, place, exact in _renewed(call, len(returned)):
        for sibling in siblings:
            target = placeholders(sibling.child.graph)[place]
            value = _node(returned, index)
            yield Link("carried", output, target, sibling, None, index, exact, value)


def _renewed(call: Call, outputs: int) -> Iterator[tuple[int, int, bool]]:
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
            # node cannot always be told apart, which `exact` says.
            taken.add(free[0])
            yield index, free[0], len(places) == 1
