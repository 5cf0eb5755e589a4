// Measured and expected times: bars with spread, lines with their crossings, the roofline.

import * as Plot from "@observablehq/plot";
import { dots, figure, lines } from "./chart";
import { choice, h, number, table, type Cell } from "./dom";
import { axisOf, crossings, fastest, fieldsOf, problemText, restOf, timesOf, type Best, type Point } from "./measured";
import { of, type Bench, type Prediction, type Report } from "./model";

export function benchmarks(report: Report): Node[] {
  const measured = of(report, "bench");
  const parts = measured.flatMap(({ name, data }) => [h("h3", {}, `${data.op}, ${data.world} ranks on ${data.backend}${data.link && ` over ${data.link}`} (${name})`), ...one(data)]);
  const expected = of(report, "predict").flatMap(({ name, data }) => [h("h3", {}, `Predictions (${name})`), ...predictions(data.points)]);
  return [...twoRuns(report), ...parts, ...expected];
}

function one(bench: Bench): Node[] {
  const best = fastest(bench);
  if (!best.length) return [h("p", { class: "note" }, "No variant was timed."), rows(bench)];
  const problems = [...new Set(best.map(({ row }) => row.problem))];
  const place = h("div");
  const draw = (at: number) => place.replaceChildren(bars(best.filter(({ row }) => row.problem === problems[at])));
  draw(problems.length - 1);
  return [choice("Problem", problems.map(problemText), draw, problems.length - 1), place, ...axes(best), roofline(bench, best), rows(bench)];
}

function bars(best: Best[]): HTMLElement {
  const data = best.map(({ row, times }) => ({ name: row.variant, median: times.median / 1e3, low: times.low / 1e3, high: times.high / 1e3, limit: row.limit_ns / 1e3, own: row.config ? "this op" : "baseline" }));
  return figure(`bars of ${data.length} variants`, "Median of the slowest rank, the fastest config of each; the line spans 20 to 80 %, the red mark is the limit of the GPU.", {
    marginLeft: 140, height: 60 + 34 * data.length, x: { label: "us", grid: true, zero: true }, y: { label: null }, color: { domain: ["this op", "baseline"], range: ["var(--fetch)", "var(--launch)"], legend: true },
    marks: [
      Plot.barX(data, { y: "name", x: "median", fill: "own", sort: { y: "x" } }),
      Plot.ruleY(data, { y: "name", x1: "low", x2: "high", stroke: "var(--text)", strokeWidth: 2 }),
      Plot.tickX(data.filter(({ limit }) => limit > 0), { y: "name", x: "limit", stroke: "var(--missing)", strokeWidth: 3 }),
      Plot.text(data, { y: "name", x: "high", text: (each) => number(each.median), dx: 6, textAnchor: "start", fill: "var(--text)" }),
    ],
  });
}

/** A chart for each group of problems that differ along one axis alone. */
function axes(best: Best[]): Node[] {
  const axis = axisOf(best.map(({ row }) => row.problem));
  const groups = Map.groupBy(best, ({ row }) => restOf(row.problem, axis));
  return [...groups].flatMap(([rest, group]) => {
    const points = group.map(({ row, times }): Point => ({ at: Number(fieldsOf(row.problem).get(axis)), name: row.variant, time: times.median / 1e3 }));
    if (new Set(points.map(({ at }) => at)).size < 2) return [];
    return [timeLines(points, axis, rest), crossingList(crossings(points, axis))];
  });
}

function timeLines(points: Point[], axis: string, rest: string): HTMLElement {
  const names = [...new Set(points.map(({ name }) => name))];
  return figure(`time against ${axis} of ${names.join(", ")}`, rest, {
    x: { type: "log", label: axis, grid: true }, y: { type: "log", label: "us", grid: true, tickFormat: "~g" }, color: { legend: true, domain: names },
    marks: [lines(points, { x: "at", y: "time", stroke: "name", sort: "at" }), dots(points, { x: "at", y: "time", fill: "name" })],
  });
}

function crossingList(sentences: string[]): HTMLElement {
  return sentences.length ? h("ul", { class: "crossings" }, ...sentences.map((each) => h("li", {}, each))) : h("p", { class: "note" }, "One is the fastest throughout.");
}

function roofline(bench: Bench, best: Best[]): HTMLElement {
  const { copy = 0, gemm = 0 } = bench.rates ?? {};
  const ranks = bench.link ? 1 : bench.world;
  const data = best.filter(({ row }) => row.hbm_bytes > 0).map(({ row, times }) => ({
    name: row.variant, intensity: Math.max(row.flops, 1) / row.hbm_bytes, rate: (Math.max(row.flops, 1) * ranks) / (times.median * 1e-9) / 1e12, problem: problemText(row.problem),
  }));
  if (!copy || !gemm || !data.length) return h("p", { class: "note" }, "The file has no rates of this GPU, so there is no roofline.");
  const ridge = gemm / copy;
  const [low, high] = [Math.min(...data.map(({ intensity }) => intensity), ridge) / 4, Math.max(...data.map(({ intensity }) => intensity), ridge) * 4];
  const roof = [low, ridge, high].map((intensity) => ({ intensity, rate: Math.min(gemm, copy * intensity) / 1e12 }));
  return figure("roofline", `Roofs: ${number(copy / 1e12)} TB/s copied, ${number(gemm / 1e12)} TFLOP/s of bfloat16, both measured in the same run.`, {
    x: { type: "log", label: "operations per byte of memory", grid: true, tickFormat: "~g" }, y: { type: "log", label: "TFLOP/s of all ranks", grid: true, tickFormat: "~g" }, color: { legend: true },
    marks: [Plot.line(roof, { x: "intensity", y: "rate", stroke: "var(--missing)", strokeWidth: 2 }), dots(data, { x: "intensity", y: "rate", fill: "name", r: 5, title: (each) => `${each.name}: ${each.problem}` })],
  });
}

function rows(bench: Bench): HTMLElement {
  const cells = bench.rows.map((row): Cell[] => {
    const times = timesOf(row.samples_ns);
    const micro = (time?: number) => (time === undefined ? "" : number(time / 1e3));
    return [problemText(row.problem), row.variant, row.config.replace(/^Config\(|\)$/g, ""), micro(times?.median), micro(times?.low), micro(times?.high), times && row.limit_ns ? number(row.limit_ns / times.median) : "", row.wrong];
  });
  return table(`All rows of ${bench.op}`, ["problem", "variant", "config", "median, us", "20 %", "80 %", "limit", "wrong"], cells);
}

function predictions(points: Prediction[]): Node[] {
  const axis = axisOf(points.map(({ problem }) => problem));
  const all = points.flatMap((point) => Object.entries(point.times).map(([algo, time]) => ({ at: Number(fieldsOf(point.problem).get(axis)), name: `${algo}, ${point.machine}`, time: time.seconds * 1e6, machine: point.machine })));
  const machines = [...new Set(points.map(({ machine }) => machine))];
  const chart = axis && new Set(all.map(({ at }) => at)).size > 1 ? [timeLines(all, axis, "Expected by the model, not measured.")] : [];
  const cells = points.map((point): Cell[] => [point.machine, problemText(point.problem), point.best, ...[Object.entries(point.times).map(([algo, { seconds, bound }]) => `${algo} ${number(seconds * 1e6)} us (${bound})`).join("; ")]]);
  return [...chart, ...machines.map((machine) => crossingList(crossings(all.filter((each) => each.machine === machine), axis))), table("Predictions", ["machine", "problem", "fastest", "times"], cells)];
}

/** Two runs of one op in this report: choose which commits to compare. */
function twoRuns(report: Report): Node[] {
  const groups = Map.groupBy(of(report, "bench"), ({ data }) => `${data.op}, ${data.world} ranks`);
  return [...groups].filter(([, group]) => group.length > 1).flatMap(([name, group]) => {
    const place = h("div");
    const names = group.map((each) => `${each.name} (${(each.data.machine.commit ?? "").slice(0, 9)})`);
    let [old, young] = [0, group.length - 1];
    const draw = () => place.replaceChildren(benchChanges(group[old]!.data, group[young]!.data, `${name}: ${names[old]} to ${names[young]}`));
    draw();
    return [choice("From", names, (at) => { old = at; draw(); }, old), choice("to", names, (at) => { young = at; draw(); }, young), place];
  });
}

export interface Change {
  mark: "better" | "worse" | "same";
  what: string;
  before: string;
  after: string;
}

const LEAST = 0.03; // of a time: less is noise

/** Better or worse if the medians differ by more than 3 % and the spreads do not overlap. */
export function benchDiff(before: Bench, after: Bench): Change[] {
  const old = new Map(fastest(before).map((each) => [`${each.row.problem}\n${each.row.variant}`, each]));
  return fastest(after).flatMap(({ row, times }): Change[] => {
    const was = old.get(`${row.problem}\n${row.variant}`)?.times;
    if (!was) return [];
    const apart = was.low > times.high || was.high < times.low;
    const ratio = times.median / was.median;
    const mark = apart && ratio < 1 - LEAST ? "better" : apart && ratio > 1 + LEAST ? "worse" : "same";
    const text = (each: typeof times) => `${number(each.median / 1e3)} us (${number(each.low / 1e3)} to ${number(each.high / 1e3)})`;
    return [{ mark, what: `${row.variant}, ${problemText(row.problem)}`, before: text(was), after: `${text(times)}, ${number(ratio)} of it` }];
  });
}

function benchChanges(before: Bench, after: Bench, caption: string): HTMLElement {
  return table(caption, ["", "variant and problem", "before", "after"], benchDiff(before, after).map((each): Cell[] => [h("span", { class: each.mark }, each.mark), each.what, each.before, each.after]));
}
