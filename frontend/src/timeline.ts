// A trace: a row per program, an arrow from each signal to the wait that it ended.

import { scaleLinear } from "d3";
import { criticalPath, rowsOf, summarise, type Part, type RankSummary } from "./critical";
import { button, choice, colour, h, number, onColours, percent, save, table, type Cell } from "./dom";
import { of, type Report, type Trace } from "./model";
import { MOST_ELEMENTS, surface, type Arrow, type Box, type Word } from "./surface";

const LEFT = 70;
const TOP = 22;
const TALLEST = 560;

export function timeline(report: Report): Node[] {
  const traces = of(report, "trace");
  const place = h("div");
  const draw = (at: number) => place.replaceChildren(...one(traces[at]!.data));
  draw(0);
  return traces.length > 1 ? [choice("Trace", traces.map(({ name, data }) => `${name}: ${data.title}`), draw), place] : [place];
}

function one(trace: Trace): Node[] {
  const notes = [trace.title, trace.clock, trace.dropped ? `${trace.dropped} events found no room and are missing` : ""];
  const path = criticalPath(trace);
  const sums = summarise(trace);
  const { nodes, zoomTo } = chart(trace, path);
  return [h("p", {}, notes.filter(Boolean).join("; ")), ...nodes, summary(trace, sums), overlap(sums), pathTable(trace, path, zoomTo)];
}

function spanText(trace: Trace, at: number): string {
  const { spans, unit } = trace;
  return `${spanName(trace, at)}, ${number(spans.length[at])} ${unit} from ${number(spans.begin[at])}`;
}

/** What a span is, without its times: a search looks through 100,000 of these. */
function spanName(trace: Trace, at: number): string {
  const { spans, kinds } = trace;
  const kind = kinds[spans.kind[at]!]!;
  const peer = spans.ended_by[at]! >= 0 ? `, ended by rank ${spans.ended_by[at]}` : "";
  const to = kind === "signal" ? (spans.peer[at]! >= 0 ? `, to rank ${spans.peer[at]}` : ", to all ranks") : "";
  return `rank ${spans.rank[at]} program ${spans.program[at]}: ${kind} ${spans.what[at]}${to}${peer}`;
}

function chart(trace: Trace, path: Part[]): { nodes: Node[]; zoomTo: (begin: number, end: number) => void } {
  const { spans, arrows, kinds, unit } = trace;
  const count = spans.rank.length;
  const last = spans.begin.reduce((most, begin, at) => Math.max(most, begin + spans.length[at]!), 0) || 1;
  const ranks = [...new Set(spans.rank)].sort((a, b) => a - b);
  const critical = new Set(path.map(({ span }) => span));
  const criticalArrows = new Set(path.map(({ arrow }) => arrow));
  let [from, to] = [0, last];
  let rank: number | undefined;
  let found: Set<number> | undefined;
  const frame = h("div", { class: "scroll drawing", tabindex: 0, role: "group", "aria-label": "timeline" });
  const picked = h("p", { class: "now", "aria-live": "polite" }, "Press a span to see what it is.");
  const range = h("p", { class: "range note" });
  const results = h("div");
  const showArrows = h("input", { type: "checkbox", checked: true, change: () => paint() });
  const showPath = h("input", { type: "checkbox", change: () => paint() });
  const search = h("input", { type: "search", placeholder: "wait rank 2 …", input: () => look() });

  const rows = rowsOf(trace);
  const pathColour = () => colour("critical");

  /** The boxes of the spans in view. Of those that would hide one another, below half a pixel, one stays. */
  function boxesOf(x: (time: number) => number, [first, end]: [number, number], height: number, right: number): Box[] {
    const fills = kinds.map((kind) => colour(kind));
    const [many, onPath, outline] = [count > MOST_ELEMENTS, showPath.checked, pathColour()];
    const reached = new Float64Array(rows.names.length);
    const boxes: Box[] = [];
    for (let at = 0; at < count; at++) {
      const [place, begin] = [rows.ofSpan[at]!, spans.begin[at]!];
      const until = begin + spans.length[at]!;
      if (place < first || place >= end || until < from || begin > to) continue;
      const [left, last] = [Math.max(x(begin), LEFT), Math.min(x(until), right)];
      const isCritical = onPath && critical.has(at);
      if (many && last - left < 0.5 && last <= reached[place]! + 0.5 && !isCritical && !found?.has(at)) continue;
      if (last > reached[place]!) reached[place] = last;
      boxes.push({
        x: left, y: TOP + (place - first) * height, width: last - left, height: Math.max(height - 1, 1), index: at, fill: fills[spans.kind[at]!]!,
        title: many ? "" : spanText(trace, at), faint: (found !== undefined && !found.has(at)) || (onPath && !isCritical), outline: isCritical ? outline : undefined,
      });
    }
    return boxes;
  }

  function arrowsOf(x: (time: number) => number, [first, end]: [number, number], height: number, right: number): Arrow[] {
    const [signal, critical, many] = [colour("signal"), pathColour(), arrows.length > MOST_ELEMENTS];
    const middle = (row: number) => TOP + (row - first + 0.5) * height;
    const inView = (row: number) => row >= first && row < end;
    const lines: Arrow[] = [];
    for (let at = 0; at < arrows.length; at++) {
      const [r1, p1, t1, r2, p2, t2] = arrows[at]!;
      const [source, target] = [rows.ofArrow[2 * at]!, rows.ofArrow[2 * at + 1]!];
      const onPath = showPath.checked && criticalArrows.has(at);
      if (!inView(source) || !inView(target) || t2 < from || t1 > to || !(showArrows.checked || onPath)) continue;
      lines.push({
        x1: Math.max(x(t1), LEFT), x2: Math.min(x(t2), right), y1: middle(source), y2: middle(target), stroke: onPath ? critical : signal, width: onPath ? 2.5 : 1, faint: !onPath,
        title: many ? "" : `signal of rank ${r1} program ${p1} ends the wait of rank ${r2} program ${p2}`,
      });
    }
    return lines;
  }

  function paint(): void {
    const shown = rows.range(rank);
    const size = shown[1] - shown[0];
    const width = Math.max(frame.clientWidth - 18, 900);
    const height = Math.max(Math.min(TALLEST / size, 18), 2);
    const x = scaleLinear([from, to], [LEFT, width - 10]);
    const slope = (width - 10 - LEFT) / (to - from);
    const place = (time: number) => LEFT + (time - from) * slope;
    const boxes = boxesOf(place, shown, height, width - 10);
    const lines = arrowsOf(place, shown, height, width - 10);
    const words: Word[] = x.ticks(8).map((tick) => ({ x: x(tick), y: 14, text: number(tick), fill: colour("dim"), anchor: "middle" }));
    for (const each of rank === undefined ? ranks : [rank]) {
      words.push({ x: 4, y: TOP + (rows.range(each)[0] - shown[0] + 0.5) * height + 5, text: `rank ${each}`, fill: colour("text") });
    }
    const label = `timeline of ${count} spans and ${arrows.length} arrows`;
    const made = surface(width, TOP + size * height + 4, label, boxes.length + lines.length, (at) => (picked.textContent = spanText(trace, at)));
    made.draw({ boxes, arrows: lines, words, over: true });
    frame.replaceChildren(made.node);
    range.textContent = `${number(from)} to ${number(to)} of ${number(last)} ${unit}`;
  }

  function zoomTo(begin: number, end: number): void {
    const length = Math.min(Math.max(end - begin, last / 1e6), last);
    from = Math.min(Math.max(begin, 0), last - length);
    to = from + length;
    paint();
  }
  const zoom = (factor: number, about = (from + to) / 2) => zoomTo(about - (about - from) * factor, about + (to - about) * factor);
  const pan = (part: number) => zoomTo(from + part * (to - from), to + part * (to - from));

  function look(): void {
    const words = (search.value.toLowerCase().match(/(?:rank|program) \d+|\S+/g) ?? []).map((word) => new RegExp(`${word.replace(/[^\w\s]/g, "\\$&")}(?!\\d)`));
    found = words.length ? new Set() : undefined;
    const hits: number[] = [];
    for (let at = 0; found && at < count; at++) {
      const name = spanName(trace, at).toLowerCase();
      if (!words.every((word) => word.test(name))) continue;
      found.add(at);
      hits.push(at);
    }
    const hit = (at: number): Cell[] => [button("show", () => zoomTo(spans.begin[at]! - spans.length[at]!, spans.begin[at]! + 2 * spans.length[at]!)), spanText(trace, at)];
    const matching = table("Spans that match", ["", "span"], { length: hits.length, at: (place) => hit(hits[place]!) });
    results.replaceChildren(...(found ? [h("p", { role: "status" }, `${found.size} of ${count} spans match`), matching] : []));
    paint();
  }

  frame.addEventListener("keydown", (event) => {
    const does: Record<string, () => void> = {
      "+": () => zoom(0.5), "=": () => zoom(0.5), "-": () => zoom(2), ArrowLeft: () => pan(-0.2), ArrowRight: () => pan(0.2), "0": () => zoomTo(0, last),
    };
    if (!does[event.key]) return;
    event.preventDefault();
    does[event.key]!();
  });
  frame.addEventListener("wheel", (event) => {
    if (!event.ctrlKey) return; // a plain wheel moves the page
    event.preventDefault();
    const part = (event.clientX - frame.getBoundingClientRect().left - LEFT) / Math.max(frame.clientWidth - LEFT - 28, 1);
    zoom(event.deltaY < 0 ? 0.7 : 1.4, from + Math.min(Math.max(part, 0), 1) * (to - from));
  }, { passive: false });
  requestAnimationFrame(() => paint());
  onColours(frame, paint);
  const which = choice("Rank", ["all", ...ranks.map(String)], (at) => {
    rank = at ? ranks[at - 1] : undefined;
    paint();
  });
  const legend = h("ul", { class: "legend" }, ...kinds.map((kind) => h("li", {}, h("span", { class: `swatch ${kind}` }), kind)), h("li", {}, "arrows: from a signal to the wait that it ended"));
  const controls = h(
    "div", { class: "controls" }, which, button("Zoom in", () => zoom(0.5), "+"), button("Zoom out", () => zoom(2), "-"),
    button("◀ Earlier", () => pan(-0.2)), button("Later ▶", () => pan(0.2)), button("Whole trace", () => zoomTo(0, last), "0"),
    h("label", {}, showArrows, " arrows"), h("label", {}, showPath, " critical path"), h("label", {}, "Search ", search),
    button("Save for ui.perfetto.dev", () => save("trace.json", perfetto(trace))),
  );
  const row = (at: number): Cell[] => [spans.rank[at], spans.program[at], kinds[spans.kind[at]!], number(spans.begin[at]), number(spans.length[at]), spans.ended_by[at]! < 0 ? "" : spans.ended_by[at]];
  const all = h("details", {}, h("summary", {}, "The spans as a table"), table("Spans", ["rank", "program", "kind", `begin, ${unit}`, `length, ${unit}`, "ended by rank"], { length: count, at: row }));
  return { nodes: [controls, range, frame, picked, legend, results, all], zoomTo };
}

function summary(trace: Trace, sums: RankSummary[]): HTMLElement {
  const rows = sums.map((each): Cell[] => {
    const most = [...each.waitedFor].sort((a, b) => b[1] - a[1])[0];
    const whom = !most ? "" : most[0] < 0 ? "nobody seen" : most[0] === each.rank ? "itself" : `rank ${most[0]}`;
    return [each.rank, number(each.length), percent(each.waited, each.busy), most ? `${whom}, ${percent(most[1], each.busy)}` : "", each.link && each.compute ? percent(each.both, each.link) : "–"];
  });
  return table("By rank", ["rank", `length, ${trace.unit}`, "program time waited", "most for", "link time hidden"], rows);
}

/** Of each rank's time: computing, moving data, both at once, only waiting. */
function overlap(sums: RankSummary[]): HTMLElement {
  const rows = sums.map((each): Cell[] => {
    const parts: [string, number][] = [["compute", each.compute - each.both], ["barrier", each.both], ["fetch", each.link - each.both], ["wait", each.onlyWaiting]];
    const bars = parts.map(([name, time]) => h("span", { class: `bar swatch ${name}`, style: `width:${(260 * time) / Math.max(each.length, 1e-9)}px;margin:0;border-radius:0` }));
    return [each.rank, h("span", { "aria-hidden": "true" }, ...bars), ...parts.map(([, time]) => percent(time, each.length))];
  });
  return table("Overlap: what a rank did, of its length", ["rank", "", "compute alone", "compute and link", "link alone", "only waiting"], rows);
}

function pathTable(trace: Trace, path: Part[], zoomTo: (begin: number, end: number) => void): HTMLElement {
  const { spans, kinds, unit } = trace;
  const whole = path.length ? path.at(-1)!.end - path[0]!.begin : 0;
  const rows = path.map(({ span, begin, end, arrow }): Cell[] => [
    button(number(begin), () => zoomTo(begin - (end - begin), end + (end - begin))), number(end - begin), percent(end - begin, whole), `rank ${spans.rank[span]} program ${spans.program[span]}`, kinds[spans.kind[span]!],
    arrow === undefined ? "" : `rank ${trace.arrows[arrow]![0]} program ${trace.arrows[arrow]![1]}`,
  ]);
  return table(`Critical path: ${number(whole)} ${unit} in ${path.length} parts`, [`from, ${unit}`, `takes, ${unit}`, "share", "where", "what", "ended by a signal of"], rows);
}

/** The file that `sundog trace` writes, again. */
function perfetto({ title, unit, clock, dropped, kinds, spans, arrows }: Trace): string {
  const names = [...new Set(spans.rank)].map((rank) => ({ ph: "M", name: "process_name", pid: rank, args: { name: `rank ${rank}` } }));
  const slices = spans.rank.map((rank, at) => ({
    ph: "X", name: kinds[spans.kind[at]!], pid: rank, tid: spans.program[at], ts: spans.begin[at], dur: spans.length[at],
    args: { what: spans.what[at], value: spans.value[at], peer: spans.peer[at], ended_by: spans.ended_by[at] },
  }));
  const flows = arrows.flatMap(([r1, p1, t1, r2, p2, t2], id) => [
    { ph: "s", id, cat: "signal", name: "signal", pid: r1, tid: p1, ts: t1 },
    { ph: "f", id, cat: "signal", name: "signal", pid: r2, tid: p2, ts: t2, bp: "e" },
  ]);
  const otherData = { op: title, time: unit === "us" ? "ns" : unit, clocks: clock, dropped };
  return JSON.stringify({ otherData, traceEvents: [...names, ...slices, ...flows] });
}
