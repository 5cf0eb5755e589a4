// Who waits for whom when nothing goes on: the wait-for graph, and the cycle in it.

import { h, table } from "./dom";
import { cycleOf, layered, onCycle, type GraphEdge, type GraphNode } from "./layered";
import type { Run } from "./model";
import { eventText, laneName } from "./race";

const MOST_NODES = 150;
const TAIL = 256; // events at the end in which a livelock repeats itself

export function waitFor(run: Run): Node[] {
  const [nodes, edges] = run.failure === "Deadlock" ? deadlock(run) : livelock(run);
  const cycle = onCycle(edges);
  for (const node of nodes) if (cycle.has(node.id)) node.class = `${node.class ?? ""} cycle`;
  for (const edge of edges) if (cycle.has(edge.from) && cycle.has(edge.to)) edge.class = "cycle";
  const drawn = nodes.length <= MOST_NODES
    ? h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "wait-for graph" }, layered(`wait-for graph of ${nodes.length} parties`, nodes, edges))
    : h("p", { class: "note" }, `${nodes.length} parties are too many to draw: the table has them.`);
  const label = new Map(nodes.map((node) => [node.id, node.label]));
  const path = cycleOf(edges).map((id) => label.get(id)!);
  const says = path.length ? `The cycle: ${[...path, path[0]].join(" → ")}.`
    : "There is no cycle: somebody has ended, or never began, without giving the signal.";
  const pairs = table("Who waits for whom", ["party", "waits for", "because it"], edges.map(({ from, to, title }) => [label.get(from), label.get(to), title]));
  return [h("h3", {}, "Who waits for whom"), h("p", { class: "cycle-text" }, says), drawn, pairs, details(run)];
}

function deadlock(run: Run): [GraphNode[], GraphEdge[]] {
  const name = (rank: number, program: number[]) => `${rank}:${program.join(",")}`;
  const nodes: GraphNode[] = run.hosts.map((host) => ({
    id: `host ${host.rank}`, label: `rank ${host.rank} host: ${host.state === "waits" ? `waits for ${host.waits_for}` : host.state}`, class: host.state, title: host.at,
  }));
  const edges: GraphEdge[] = [];
  for (const wait of run.waits) {
    const id = name(wait.rank, wait.program);
    nodes.push({ id, label: `rank ${wait.rank} ${wait.kernel}(${wait.program.join(",")})`, class: "waits", title: wait.stack[0] });
    edges.push({ from: `host ${wait.rank}`, to: id, title: "waits for its kernel to end" });
    for (const rank of owing(run, wait)) {
      const same = run.waits.filter((other) => other.rank === rank && other.kernel === wait.kernel);
      const targets = same.length ? same.map((other) => name(other.rank, other.program)) : [`host ${rank}`];
      const twin = targets.find((target) => target === name(rank, wait.program));
      for (const to of twin ? [twin] : targets) edges.push({ from: id, to, title: `waits for ${wait.flags.slice(0, 3).join(", ")}` });
    }
  }
  return [nodes, edges.filter(({ from, to }) => [from, to].every((id) => nodes.some((node) => node.id === id)))];
}

/** Who can end a wait: the rank that it names, else the ranks that wrote the flag before. */
function owing(run: Run, wait: Run["waits"][number]): number[] {
  if (wait.owes !== null) return [wait.owes];
  const flags = new Set(wait.flags.map((flag) => flag.split("[")[0]));
  const writers = run.events.flatMap(([number, memory]) => {
    const place = run.places[number]!;
    return flags.has(memory.split("[")[0]!) && place.sem.includes("rel") ? [run.lanes[place.lane]!.rank] : [];
  });
  return [...new Set(writers)].filter((rank) => rank !== wait.rank);
}

/** Of a livelock: each program waits for those that write the words that it reads over and over. */
function livelock(run: Run): [GraphNode[], GraphEdge[]] {
  const tail = run.events.slice(-TAIL).map(([number, memory]) => ({ place: run.places[number]!, memory }));
  const lanes = [...new Set(tail.map(({ place }) => place.lane))];
  const nodes = lanes.map((lane): GraphNode => ({ id: String(lane), label: laneName(run, lane), class: "waits", title: eventText(run, lastOf(run, lane)) }));
  const words = tail.filter(({ place }) => place.sem || place.what.startsWith("volatile"));
  const edges = new Map<string, GraphEdge>();
  for (const [memory, here] of Map.groupBy(words, (each) => each.memory)) {
    const readers = new Map(here.map(({ place }) => [place.lane, place]));
    const writers = new Set(here.filter(({ place }) => place.sem && !place.what.startsWith("volatile")).map(({ place }) => place.lane));
    for (const [reader, place] of readers) {
      for (const writer of writers) {
        const where = place.file && ` at ${place.file}:${place.line}`;
        if (reader !== writer) edges.set(`${reader} ${writer} ${memory}`, { from: String(reader), to: String(writer), title: `reads ${memory} again and again${where}, which the other one changes` });
      }
    }
  }
  return [nodes, [...edges.values()]];
}

function lastOf(run: Run, lane: number): number {
  return run.events.findLastIndex(([number]) => run.places[number]!.lane === lane);
}

function details(run: Run): HTMLElement {
  if (run.failure !== "Deadlock") {
    const last = run.events.slice(-12).map((_, at) => [eventText(run, Math.max(run.events.length - 12, 0) + at)]);
    return table("The last steps, which repeat", ["step"], last);
  }
  return table("Waits", ["rank", "program", "waits for", "goes on while", "owed by", "at", "source"], run.waits.map((wait) => [
    wait.rank, `${wait.kernel}(${wait.program.join(",")})`, wait.flags.map((flag, at) => `${flag} = ${wait.seen[at]}`).slice(0, 4).join(", "),
    wait.expected, wait.owes === null ? "not named" : `rank ${wait.owes}`, wait.stack[0], wait.source[0],
  ]));
}
