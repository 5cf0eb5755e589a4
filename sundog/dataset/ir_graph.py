"""Define the IR graph record that both front ends write: one JSON object in node-link form.

    graph = to_networkx(record)            # a MultiDiGraph
    networkx.node_link_graph(record, edges="links", multigraph=True)   # the same, by hand

Helion's device IR (`helion/`) and Triton's TTIR and TTGIR (`triton/`) fill the same envelope. What
a node or an edge carries beyond it is in each front end's TypedDict. `ir_id` is the hash of the
record without run identity: two runs of one kernel share it.
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any, TypedDict

if TYPE_CHECKING:
    import networkx

# Readers gate on record.get("schema_version", 0); raise it when a field changes its meaning.
IR_SCHEMA_VERSION = 1

# Identifies the run, not the graph, so it is left out of ir_id.
_RUN_IDENTITY = ("run_id", "kernel_id", "kernel_name", "input_shapes", "stages")


class IrGraphRecord(TypedDict):
    """A graph, as front ends make it and `Dataset.record` returns it."""

    schema_version: int
    ir_id: str
    run_id: str | None
    directed: bool  # always True
    multigraph: bool  # always True: an operation may use one value twice
    graph: dict[str, Any]  # frontend, run_id, kernel_id, kernel_name, ...: see the front end
    nodes: list[dict[str, Any]]  # each with "id"
    links: list[dict[str, Any]]  # each with "source", "target", "key", "edge_kind"


def canonical_json(value: object) -> str:
    """Return JSON with one spelling: sorted keys, no spaces, NaN refused."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def ir_id_of(record: IrGraphRecord) -> str:
    """Return the sha256 of the record without run identity: equal IR has an equal id."""
    graph = {k: v for k, v in record["graph"].items() if k not in _RUN_IDENTITY}
    content = {"graph": graph, "nodes": record["nodes"], "links": record["links"]}
    return hashlib.sha256(canonical_json(content).encode()).hexdigest()


def to_networkx(record: IrGraphRecord) -> networkx.MultiDiGraph:
    """Return the record as a graph, with networkx before 3.4 (`link=`) and after (`edges=`).

    Raises ValueError if its nodes and links make none.
    """
    import inspect

    import networkx as nx

    new = "edges" in inspect.signature(nx.node_link_graph).parameters
    name = {"edges" if new else "link": "links"}
    try:
        return nx.node_link_graph(record, directed=True, multigraph=True, **name)
    except (KeyError, TypeError, AttributeError, nx.NetworkXException) as error:
        raise ValueError(f"the record's nodes and links make no graph: {error!r}") from error
