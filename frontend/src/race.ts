// A finding as a space-time diagram: a lane per program, events in the order of the schedule.

import { button, choice, colour, h, listing, onColours, table, type Cell } from "./dom";
import { of, type Check, type Finding, type Report, type Run } from "./model";
import { MOST_ELEMENTS, surface, type Arrow, type Drawing, type Surface } from "./surface";
import { waitFor } from "./waitfor";

const LANE = 44;
const LEFT = 190;
const STEP = 46;
const MOST_WIDTH = 16_000;

export function race(report: Report): Node[] {
  const found = of(report, "check").flatMap(({ name, data }) =>
    [...data.findings, ...data.remarks].map((finding) => ({ name, data, finding })));
  const place = h("div");
  const draw = (at: number) => place.replaceChildren(...one(found[at]!.data, found[at]!.finding));
  const names = found.map(({ name, finding }, at) => `${at + 1}. ${title(finding)} (${name})`);
  draw(0);
  return [choice("Finding", names, draw), place];
}

function title(finding: Finding): string {
  return finding.rule ? `${finding.kind}: ${finding.rule}` : finding.kind;
}

function one(check: Check, finding: Finding): Node[] {
  const run = check.runs[finding.run ?? -1];
  const head = h(
    "div", { class: "card" }, h("h3", {}, title(finding), finding.count > 1 ? `, ${finding.count} times` : ""),
    h("p", { class: "why" }, finding.why), h("p", {}, h("strong", {}, finding.suggestion)),
    h("p", {}, "Replay: ", h("code", {}, `--schedule ${finding.token}`)),
  );
  if (!run) return [head, h("p", { class: "note" }, "The file has no events of this schedule: write it with this version of sundog check --json.")];
  const stuck = run.failure === "Deadlock" || run.failure === "Livelock" ? waitFor(run) : [];
  return [head, ...stuck, ...diagram(check, run, finding)];
}

export function laneName(run: Run, lane: number): string {
  const { rank, kernel, program } = run.lanes[lane]!;
  return program === null ? `rank ${rank} host` : `rank ${rank} ${kernel}(${program.join(",")})`;
}

/** What an event is, in words. */
export function eventText(run: Run, at: number): string {
  const [number, memory, times] = run.events[at]!;
  const place = run.places[number]!;
  const order = place.sem ? ` (${place.sem}, ${place.scope})` : "";
  const often = times > 1 ? `, ${times} times` : "";
  const where = place.file ? ` at ${place.file}:${place.line}` : "";
  return `${laneName(run, place.lane)}: ${place.what}${order} ${memory}${often}${where}`;
}

/** The events that orders are made of, those that touch the finding's memory, and its own two. */
function relevant(run: Run, finding: Finding): number[] {
  const own = new Set(finding.events ?? []);
  const ranks = new Set([...own].map((at) => run.lanes[run.places[run.events[at]![0]]!.lane]!.rank));
  const joined = new Set(run.edges.flatMap(([from, to]) => [from, to]));
  const allocation = finding.second?.allocation;
  return run.events.flatMap(([number, memory], at) => {
    const place = run.places[number]!;
    const near = !ranks.size || ranks.has(run.lanes[place.lane]!.rank);
    const touches = allocation && memory.startsWith(`${allocation}[`);
    return own.has(at) || (near && (place.sem || joined.has(at) || touches || place.what.includes("barrier"))) ? [at] : [];
  });
}

function fillOf(what: string): string {
  if (what.includes("barrier") || what.includes("fence")) return colour("barrier");
  if (what.startsWith("atomic") || what.startsWith("volatile")) return colour("atomic");
  if (what.startsWith("kernel")) return colour("launch");
  return what.includes("store") || what.includes("write") ? colour("store") : colour("load");
}

const LEGEND: [string, string][] = [
  ["load", "read"], ["store", "write"], ["atomic", "atomic"], ["barrier", "barrier"], ["launch", "kernel begins or ends"],
  ["order", "edge: happens before"], ["heard", "signal read, no order"], ["missing", "missing order (dashed)"],
];

/** A drawing of these events, with the step at which each of its marks is reached. */
interface Steps {
  drawing: Drawing;
  width: number;
  height: number;
  lanes: number;
  x: Map<number, number>;
  reached: number[]; // by arrow: the event at its end; -1: drawn from the first step on
}

function stepsOf(run: Run, shown: number[], [first, second]: [number?, number?]): Steps {
  const laneOf = (each: number) => run.places[run.events[each]![0]]!.lane;
  const lanes = [...new Set(shown.map(laneOf))].sort((a, b) => order(run, a) - order(run, b));
  const row = new Map(lanes.map((lane, place) => [lane, place]));
  const width = Math.min(LEFT + STEP * (shown.length + 1), MOST_WIDTH);
  const step = (width - LEFT) / (shown.length + 1);
  const x = new Map(shown.map((each, place) => [each, LEFT + step * (place + 0.7)]));
  const y = (each: number) => 24 + LANE * row.get(laneOf(each))!;
  const words = lanes.map((lane, place) => ({ x: 4, y: 28 + LANE * place, text: laneName(run, lane), fill: colour("text") }));
  const arrows: Arrow[] = lanes.map((_, place) => ({ x1: LEFT, x2: width - 4, y1: 24 + LANE * place, y2: 24 + LANE * place, stroke: colour("line") }));
  const reached = arrows.map(() => -1);
  for (const [from, to, kind] of run.edges) {
    const [x1, x2] = [x.get(from), x.get(to)];
    if (x1 === undefined || x2 === undefined) continue;
    const stroke = kind === "heard" ? colour("heard") : kind === "order" ? colour("order") : colour("faint");
    const says = kind === "heard" ? "a signal that was read and gives no order" : `happens before (${kind})`;
    arrows.push({ x1, x2, y1: y(from), y2: y(to), stroke, width: kind === "order" || kind === "heard" ? 2 : 1, title: says });
    reached.push(to);
  }
  if (first !== undefined && second !== undefined && x.has(first) && x.has(second) && first !== second) {
    arrows.push({ x1: x.get(first)!, x2: x.get(second)!, y1: y(first), y2: y(second), stroke: colour("missing"), width: 2.5, dashed: true, title: "missing order: nothing makes the first access happen before the second" });
    reached.push(-1);
  }
  const size = Math.min(14, Math.max(step * 0.6, 2));
  const many = shown.length + arrows.length > MOST_ELEMENTS; // a canvas shows no titles
  const boxes = shown.map((each) => ({
    x: x.get(each)! - size / 2, y: y(each) - size / 2, width: size, height: size, index: each, round: true,
    fill: fillOf(run.places[run.events[each]![0]]!.what), title: many ? "" : eventText(run, each),
  }));
  return { drawing: { boxes, arrows, words }, width, height: 24 + LANE * lanes.length, lanes: lanes.length, x, reached };
}

function diagram(check: Check, run: Run, finding: Finding): Node[] {
  const [first, second] = finding.events?.length === 2 ? finding.events : [undefined, undefined];
  let shown: number[] = [];
  let at = 0;
  let steps: Steps;
  let made: Surface;
  const drawing = h("div", { class: "scroll drawing", tabindex: 0, role: "group", "aria-label": "space-time diagram" });
  const now = h("p", { class: "now", "aria-live": "polite" });
  const source = h("div", { class: "sources" });
  const events = h("div");
  const slider = h("input", { type: "range", min: 0, value: 0, "aria-label": "step of the schedule", input: () => go(Number(slider.value)) });
  const all = h("input", { type: "checkbox", change: () => choose(all.checked) });

  function choose(everything: boolean): void {
    shown = everything ? run.events.map((_, each) => each) : relevant(run, finding);
    slider.max = String(Math.max(shown.length - 1, 0));
    events.replaceChildren(table("Events", ["step", "lane", "what", "memory", "where"], { length: shown.length, at: (step) => row(shown[step]!, step) }));
    prepare();
    go(second === undefined ? shown.length - 1 : Math.max(shown.indexOf(second), 0));
  }

  function prepare(): void {
    steps = stepsOf(run, shown, [first, second]);
    const marks = steps.drawing.boxes.length + steps.drawing.arrows.length;
    made = surface(steps.width, steps.height, `space-time diagram of ${shown.length} events in ${steps.lanes} lanes`, marks, (each) => go(shown.indexOf(each)));
    drawing.replaceChildren(made.node);
  }

  function row(each: number, step: number): Cell[] {
    const [number, memory, times] = run.events[each]!;
    const place = run.places[number]!;
    const what = `${place.what}${place.sem && ` (${place.sem}, ${place.scope})`}${times > 1 ? ` × ${times}` : ""}`;
    const mark = each === first ? " (first access)" : each === second ? " (second access)" : "";
    return [button(String(step + 1), () => go(step)), laneName(run, place.lane), what + mark, memory, place.file && `${place.file}:${place.line}`];
  }

  function go(to: number): void {
    at = Math.min(Math.max(to, 0), shown.length - 1);
    slider.value = String(at);
    const event = shown[at];
    now.textContent = event === undefined ? "no events" : `Step ${at + 1} of ${shown.length}: ${eventText(run, event)}`;
    paint();
    showSource(event);
  }

  /** What comes after this step is faint. */
  function paint(): void {
    const current = shown[at] ?? 0;
    for (const box of steps.drawing.boxes) {
      box.faint = box.index > current;
      box.outline = box.index === first || box.index === second ? colour("missing") : box.index === current ? colour("text") : undefined;
    }
    for (const [which, arrow] of steps.drawing.arrows.entries()) arrow.faint = steps.reached[which]! > current;
    made.draw(steps.drawing);
    drawing.scrollLeft = Math.max((steps.x.get(current) ?? 0) - drawing.clientWidth / 2, 0);
  }

  function showSource(event: number | undefined): void {
    const lines = new Map<string, Map<number, string>>();
    const mark = (each: number | undefined, name: string) => {
      const place = each === undefined ? undefined : run.places[run.events[each]![0]];
      if (place?.file) lines.set(place.file, (lines.get(place.file) ?? new Map()).set(place.line, name));
    };
    mark(first, "first");
    mark(second, "second");
    mark(event, "current");
    source.replaceChildren(...[...lines].flatMap(([file, marked]) => {
      const text = check.source?.[file];
      return text ? [listing(file, text.first, text.lines, (line) => marked.get(line) ?? "")] : [];
    }));
    requestAnimationFrame(() => {
      for (const row of source.querySelectorAll<HTMLElement>(".current")) {
        row.closest(".listing")!.scrollTop = row.offsetTop - 110;
      }
    });
  }

  choose(false);
  onColours(drawing, () => { prepare(); paint(); });
  drawing.addEventListener("keydown", (event) => {
    const steps: Record<string, number> = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: shown.length - 1 };
    if (steps[event.key] === undefined) return;
    event.preventDefault();
    go(steps[event.key]!);
  });
  const legend = h("ul", { class: "legend" }, ...LEGEND.map(([name, text]) => h("li", {}, h("span", { class: `swatch ${name}` }), text)));
  const dropped = run.dropped ? h("p", { class: "note" }, `The first ${run.dropped} events of this schedule are left out.`) : null;
  return [
    h("div", { class: "controls" }, button("◀ Step back", () => go(at - 1)), slider, button("Step forward ▶", () => go(at + 1)), h("label", {}, all, " all events")),
    now, drawing, legend, ...(dropped ? [dropped] : []), source, events,
  ];
}

/** Lanes of one rank together, its host first. */
function order(run: Run, lane: number): number {
  const { rank, program } = run.lanes[lane]!;
  return rank * 1e6 + (program === null ? 0 : 1 + lane);
}
