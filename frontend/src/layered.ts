// A directed graph in layers, laid out by dagre.

import { Graph, layout } from "@dagrejs/dagre";
import { s } from "./dom";

export interface GraphNode {
  id: string;
  label: string;
  class?: string;
  title?: string;
}
export interface GraphEdge {
  from: string;
  to: string;
  class?: string;
  title?: string;
}

const CHARACTER = 7.2;

/** Draw nodes and edges; `press` is called with a node's id, by pointer, Enter or Space. */
export function layered(label: string, nodes: GraphNode[], edges: GraphEdge[], press?: (id: string) => void): SVGSVGElement {
  const graph = new Graph({ multigraph: true });
  graph.setGraph({ rankdir: "TB", nodesep: 18, ranksep: 34, marginx: 8, marginy: 8 });
  graph.setDefaultEdgeLabel(() => ({}));
  for (const node of nodes) graph.setNode(node.id, { width: 20 + CHARACTER * Math.min(node.label.length, 60), height: 28 });
  edges.forEach((edge, at) => graph.setEdge(edge.from, edge.to, {}, String(at)));
  layout(graph);
  const { width = 0, height = 0 } = graph.graph() as { width?: number; height?: number };
  const drawn = edges.map((edge, at) => {
    const { points } = graph.edge(edge.from, edge.to, String(at)) as { points: { x: number; y: number }[] };
    return s("g", { class: `edge ${edge.class ?? ""}` }, s("title", {}, edge.title ?? ""),
      s("path", { d: `M${points.map(({ x, y }) => `${x},${y}`).join("L")}`, "marker-end": "url(#head)" }));
  });
  const boxes = nodes.map((node) => {
    const at = graph.node(node.id) as { x: number; y: number; width: number; height: number };
    const pressed = press && (() => press(node.id));
    return s(
      "g",
      {
        class: `node ${node.class ?? ""}`, transform: `translate(${at.x - at.width / 2},${at.y - at.height / 2})`, "data-id": node.id,
        role: pressed ? "button" : undefined, tabindex: pressed ? 0 : undefined, "aria-label": pressed ? node.label : undefined, click: pressed,
        keydown: pressed && ((event: KeyboardEvent) => {
          if (event.key !== "Enter" && event.key !== " ") return;
          event.preventDefault();
          pressed();
        }),
      },
      s("title", {}, node.title ?? node.label), s("rect", { width: at.width, height: at.height, rx: 5 }),
      s("text", { x: at.width / 2, y: at.height / 2 + 4, "text-anchor": "middle" }, node.label.slice(0, 60)),
    );
  });
  const head = s("marker", { id: "head", viewBox: "0 0 10 10", refX: 9, refY: 5, markerWidth: 7, markerHeight: 7, orient: "auto" }, s("path", { d: "M0,0L10,5L0,10z", class: "arrowhead" }));
  return s("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: press ? "group" : "img", "aria-label": label, class: "layered" }, s("defs", {}, head), ...drawn, ...boxes);
}

/** The nodes that lie on a cycle: those that can be reached from themselves. */
export function onCycle(edges: GraphEdge[]): Set<string> {
  const next = new Map<string, string[]>();
  for (const { from, to } of edges) next.set(from, [...(next.get(from) ?? []), to]);
  const found = new Set<string>();
  const reaches = (start: string): boolean => {
    const seen = new Set<string>();
    const todo = [...(next.get(start) ?? [])];
    while (todo.length) {
      const node = todo.pop()!;
      if (node === start) return true;
      if (!seen.has(node)) {
        seen.add(node);
        todo.push(...(next.get(node) ?? []));
      }
    }
    return false;
  };
  for (const node of next.keys()) if (reaches(node)) found.add(node);
  return found;
}

/** A shortest cycle, as the nodes along it; empty if there is none. */
export function cycleOf(edges: GraphEdge[]): string[] {
  const next = Map.groupBy(edges, ({ from }) => from);
  let best: string[] = [];
  for (const start of next.keys()) {
    const paths: string[][] = [[start]];
    const seen = new Set<string>();
    for (let path = paths.shift(); path && (!best.length || path.length < best.length); path = paths.shift()) {
      for (const { to } of next.get(path.at(-1)!) ?? []) {
        if (to === start) best = path;
        else if (!seen.has(to)) paths.push([...path, to]);
        seen.add(to);
      }
      if (best === path) break;
    }
  }
  return best;
}
