// The IR as a graph: regions that open and close, details, the source beside it, a diff of two configs.

import { stratify, tree } from "d3";
import { button, choice, colour, h, listing, number, onColours, table, type Cell } from "./dom";
import { layered, type GraphEdge, type GraphNode } from "./layered";
import { of, type IrGraph, type IrNode, type Report } from "./model";
import { surface, type Arrow, type Box, type Surface, type Word } from "./surface";

const MOST_LAYERED = 200; // nodes: dagre takes seconds for more
const MANY = 40; // operations of one region: from here on those of a source line are put together

export function irGraph(report: Report): Node[] {
  const graphs = of(report, "ir").flatMap(({ name, data }) => data.graphs.map((graph) => ({ name, graph })));
  const names = graphs.map(({ name, graph }) => `${graph.kernel} ${graph.stage} ${configText(graph)}${graph.ms === null ? "" : `, ${number(graph.ms)} ms`} (${name}, ${graph.ir_id.slice(0, 8)})`);
  let [shown, other] = [0, 0];
  const place = h("div");
  const draw = () => place.replaceChildren(...one(graphs[shown]!.graph, other ? graphs[other - 1]!.graph : undefined));
  draw();
  return [choice("Graph", names, (at) => { shown = at; draw(); }), choice("Compare with", ["no other", ...names], (at) => { other = at; draw(); }), place];
}

function configText(graph: IrGraph): string {
  return Object.entries(graph.config).slice(0, 6).map(([name, value]) => `${name}=${typeof value === "object" ? JSON.stringify(value) : value}`).join(",");
}

/** Put the operations of a large region together by source line, as regions that can be opened. */
function byLine(graph: IrGraph): IrGraph {
  const sizes = new Map<string, number>();
  for (const node of graph.nodes) sizes.set(node.parent ?? "", (sizes.get(node.parent ?? "") ?? 0) + 1);
  const lines = new Map<string, IrNode>();
  const nodes = graph.nodes.map((node): IrNode => {
    const constant = node.label.endsWith(".constant");
    if (!(node.at.length || constant) || node.label === "tt.func" || sizes.get(node.parent ?? "")! < MANY) return node;
    const [file, line] = constant ? ["constants", 0] : (node.at as [string, number]);
    const id = `${node.parent} ${file}:${line}`;
    const text = graph.source[file];
    const label = constant ? "constants" : `${line}: ${(text?.lines[line - text.first] ?? file.split("/").at(-1)!).trim().slice(0, 44)}`;
    if (!lines.has(id)) lines.set(id, { id, label, parent: node.parent, detail: {}, at: constant ? [] : node.at });
    return { ...node, parent: id };
  });
  return { ...graph, nodes: [...nodes, ...lines.values()] };
}

function one(whole: IrGraph, other?: IrGraph): Node[] {
  const graph = byLine(whole);
  const nodes = new Map(graph.nodes.map((node) => [node.id, node]));
  const children = Map.groupBy(graph.nodes.filter((node) => node.parent), (node) => node.parent!);
  const marks = other ? diff(other, whole) : undefined;
  const open = new Set(graph.nodes.filter((node) => children.has(node.id) && !node.id.includes(" ") && depth(node) < 2).map((node) => node.id));
  let chosen: string | undefined;
  let line: [string, number] | undefined;
  const drawing = h("div", { class: "scroll drawing wide", tabindex: 0, role: "group", "aria-label": "IR graph" });
  const beside = h("div");
  const listed = h("div");

  function depth(node: IrNode): number {
    let steps = 0;
    for (let at = node.parent; at; at = nodes.get(at)?.parent ?? null) steps++;
    return steps;
  }

  /** The node itself, or the closed region that it is inside. */
  function standsFor(id: string): string {
    let shown = id;
    for (let at = nodes.get(id)?.parent; at; at = nodes.get(at)?.parent) if (!open.has(at)) shown = at;
    return shown;
  }

  const isAt = (node: IrNode) => line !== undefined && node.at[0] === line[0] && node.at[1] === line[1];

  function paint(): void {
    const visible = graph.nodes.filter((node) => standsFor(node.id) === node.id);
    const ids = new Set(visible.map(({ id }) => id));
    const edges = new Map<string, GraphEdge>();
    const add = (from: string, to: string, kind: string) => { if (from !== to && ids.has(from) && ids.has(to)) edges.set(`${from} ${to}`, { from, to, class: kind, title: kind }); };
    for (const [from, to, kind] of graph.edges) add(standsFor(from), standsFor(to), kind);
    const fed = new Set([...edges.values()].map(({ to }) => to));
    for (const node of visible) if (node.parent && !fed.has(node.id)) add(node.parent, node.id, "region");
    const drawn = visible.map((node): GraphNode => {
      const inside = children.get(node.id)?.length ?? 0;
      const kinds = [inside ? "region" : "", node.id === chosen || isAt(node) ? "chosen" : "", marks?.get(node.id) ?? (inside && !open.has(node.id) && marks && differs(node.id) ? "changed" : "")];
      return { id: node.id, label: inside ? `${open.has(node.id) ? "▾" : "▸"} ${node.label}${open.has(node.id) ? "" : ` (${count(node.id)})`}` : node.label, class: kinds.join(" "), title: `${node.id} ${node.label} ${node.at.join(":")}` };
    });
    const kept = [drawing.scrollLeft, drawing.scrollTop];
    const label = `IR graph of ${graph.kernel}, ${visible.length} nodes shown, ${whole.nodes.length} in all`;
    const large = visible.length > MOST_LAYERED;
    const node = large ? asTree(label, drawn, (id) => nodes.get(id)!.parent, [...edges.values()], press).node : layered(label, drawn, [...edges.values()], press);
    drawing.replaceChildren(node);
    listed.replaceChildren(...(large ? [nodeTable(visible, press)] : []));
    [drawing.scrollLeft, drawing.scrollTop] = kept as [number, number];
    if (!chosen && !line) requestAnimationFrame(() => centre());
  }

  /** Scroll to the first node, which stands above the others. */
  function centre(): void {
    const [first, frame] = [drawing.querySelector(".node"), drawing.getBoundingClientRect()];
    const place = first?.getBoundingClientRect();
    if (place) drawing.scrollLeft += place.left - frame.left - frame.width / 2 + place.width / 2;
  }

  const differs = (id: string): boolean => (children.get(id) ?? []).some((child) => marks!.has(child.id) || differs(child.id));
  const count = (id: string): number => (children.get(id) ?? []).reduce((sum, child) => sum + 1 + count(child.id), 0);

  function press(id: string): void {
    if (chosen === id && children.has(id)) open.has(id) ? open.delete(id) : open.add(id);
    chosen = id;
    const at = nodes.get(id)!.at;
    line = at.length ? [at[0], at[1]] : undefined;
    draw();
    drawing.querySelector<SVGElement>(`[data-id="${CSS.escape(id)}"]`)?.focus();
  }

  function pressLine(file: string, number: number): void {
    [line, chosen] = [[file, number], undefined];
    for (const node of graph.nodes) if (isAt(node)) for (let at = node.parent; at; at = nodes.get(at)?.parent ?? null) open.add(at);
    draw();
  }

  function draw(): void {
    paint();
    beside.replaceChildren(...details(), ...sources());
    requestAnimationFrame(() => {
      for (const row of beside.querySelectorAll<HTMLElement>(".chosen")) row.closest(".listing")!.scrollTop = row.offsetTop - 110;
    });
  }

  function details(): Node[] {
    const node = chosen === undefined ? undefined : nodes.get(chosen);
    if (!node) {
      const here = line ? graph.nodes.filter(isAt) : [];
      return [h("p", { class: "now", "aria-live": "polite" }, line ? `${here.length} nodes come from ${line.join(":")}.` : "Press a node to see its details, a region again to open or close it, a line's number to see its nodes.")];
    }
    const rows = Object.entries(node.detail).map(([name, value]): Cell[] => [name, h("code", {}, value)]);
    const toggle = children.has(node.id) ? [button(open.has(node.id) ? "Close region" : "Open region", () => press(node.id))] : [];
    return [h("h3", { "aria-live": "polite" }, `${node.label} (${node.id})${node.at.length ? ` at ${node.at.join(":")}` : ""}`), ...toggle, table("Details", ["field", "value"], rows)];
  }

  function sources(): Node[] {
    const mapped = new Set(graph.nodes.map((node) => node.at.join(":")));
    return Object.entries(graph.source).map(([file, { first, lines }]) =>
      listing(file, first, lines, (number) => (line?.[0] === file && line[1] === number ? "chosen" : mapped.has(`${file}:${number}`) ? "mapped" : ""), (number) => pressLine(file, number)));
  }

  draw();
  onColours(drawing, paint);
  const all = (): void => { for (const id of children.keys()) open.add(id); draw(); };
  const none = (): void => { open.clear(); draw(); };
  const controls = h("div", { class: "controls" }, button("Open all regions", all), button("Close all regions", none));
  const cut = whole.left_out ? [h("p", { class: "note" }, `${whole.left_out} nodes of this graph are left out: a page has the first ${whole.nodes.length}.`)] : [];
  return [controls, ...cut, h("div", { class: "beside" }, drawing, beside), listed, ...(other && marks ? [diffTable(other, whole, marks)] : [])];
}

const TALLEST = 12_000;

/** Many nodes as the tree of their regions, in the order of the program, with the edges between them. */
function asTree(label: string, nodes: GraphNode[], parentOf: (id: string) => string | null, edges: GraphEdge[], press: (id: string) => void): Surface {
  const shown = new Set(nodes.map(({ id }) => id));
  const top = { id: " ", label: "" };
  const above = (node: GraphNode) => (node === top ? null : shown.has(parentOf(node.id) ?? "") ? parentOf(node.id) : top.id);
  const root = stratify<GraphNode>().id(({ id }) => id).parentId(above)([top, ...nodes]);
  const [column, height] = [190, Math.min(15 * nodes.length, TALLEST)];
  tree<GraphNode>().size([height, column * root.height])(root);
  const size = Math.min(13, Math.max((0.9 * height) / nodes.length, 1.5));
  const at = new Map(root.descendants().map((each) => [each.data.id, [(each.y ?? 0) - column + 8, each.x ?? 0] as [number, number]]));
  const fills: [string, string][] = [["chosen", "order"], ["added", "good"], ["changed", "heard"], ["region", "accent"]];
  const boxes = nodes.map((node, index): Box => {
    const [x, y] = at.get(node.id)!;
    const fill = fills.find(([name]) => node.class?.split(" ").includes(name))?.[1] ?? "launch";
    return { x, y: y - size / 2, width: 10, height: size, fill: colour(fill), title: node.title ?? node.label, index };
  });
  const arrows = edges.map(({ from, to, title }): Arrow => {
    const [[x1, y1], [x2, y2]] = [at.get(from)!, at.get(to)!];
    return { x1: x1 + 5, y1, x2: x2 + 5, y2, stroke: colour("faint"), title, faint: true };
  });
  const words = nodes.map((node): Word => ({ x: at.get(node.id)![0] + 14, y: at.get(node.id)![1] + 4, text: node.label.slice(0, 26), fill: colour("text") }));
  const made = surface(column * root.height + 40, height + 20, label, nodes.length + edges.length, (index) => press(nodes[index]!.id));
  made.draw({ boxes, arrows, words: size < 8 ? [] : words });
  return made;
}

function nodeTable(nodes: IrNode[], press: (id: string) => void): HTMLElement {
  const row = ({ id, label, at, detail }: IrNode): Cell[] => [button(id, () => press(id)), label, at.join(":"), Object.entries(detail).map(([name, value]) => `${name}: ${value}`).join("; ").slice(0, 200)];
  return table("Nodes shown", ["node", "operation", "source line", "details"], { length: nodes.length, at: (place) => row(nodes[place]!) });
}

/** Name nodes so that the same operation has the same name in both graphs: what, where, which one. */
function keys(graph: IrGraph): Map<string, IrNode> {
  const seen = new Map<string, number>();
  return new Map(graph.nodes.map((node) => {
    const name = `${node.label} ${node.at.join(":")}`;
    seen.set(name, (seen.get(name) ?? 0) + 1);
    return [`${name} #${seen.get(name)}`, node];
  }));
}

/** By node of the new graph: added or changed. */
function diff(before: IrGraph, after: IrGraph): Map<string, "added" | "changed"> {
  const old = keys(before);
  const marks = new Map<string, "added" | "changed">();
  for (const [key, node] of keys(after)) {
    const was = old.get(key);
    if (!was) marks.set(node.id, "added");
    else if (JSON.stringify(was.detail) !== JSON.stringify(node.detail)) marks.set(node.id, "changed");
  }
  return marks;
}

function diffTable(before: IrGraph, after: IrGraph, marks: Map<string, string>): HTMLElement {
  const [old, young] = [keys(before), keys(after)];
  const rows: Cell[][] = [];
  for (const [key, node] of young) {
    const mark = marks.get(node.id);
    if (!mark) continue;
    const was = old.get(key)?.detail ?? {};
    const fields = Object.keys({ ...was, ...node.detail }).filter((name) => was[name] !== node.detail[name]);
    rows.push([mark, key, mark === "added" ? "" : fields.map((name) => `${name}: ${was[name] ?? "–"} → ${node.detail[name] ?? "–"}`).join("\n")]);
  }
  for (const [key] of old) if (!young.has(key)) rows.push(["removed", key, ""]);
  const same = young.size - marks.size;
  return table(`From ${configText(before)} to ${configText(after)}: ${same} nodes are the same, ${rows.length} differ`, ["", "node", "what changed"], rows);
}
