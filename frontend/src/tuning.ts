// A tuning run: which configs were tried, how the best one came about, where the time went.

import * as Plot from "@observablehq/plot";
import { dots, figure, lines } from "./chart";
import { choice, h, number, percent, table, type Cell } from "./dom";
import { of, type Report, type TuningRun } from "./model";

export function tuning(report: Report): Node[] {
  const runs = of(report, "tuning").flatMap(({ name, data }) => data.runs.map((run) => ({ name, run })));
  const names = runs.map(({ name, run }) => `${run.kernel} ${run.problem} (${name}, ${run.started_at || run.session})`);
  let [shown, other] = [0, 0];
  const place = h("div");
  const draw = () => {
    const second = other ? runs[other - 1]!.run : undefined;
    place.replaceChildren(...one(runs[shown]!.run, second));
  };
  draw();
  return [choice("Run", names, (at) => { shown = at; draw(); }), choice("Compare with", ["no other", ...names], (at) => { other = at; draw(); }), place];
}

function one(run: TuningRun, other?: TuningRun): Node[] {
  return [parallel(run), bestSoFar(run, other), timeTable(other ? [run, other] : [run]), ...(other ? [changes(other, run)] : []), attempts(run)];
}

const text = (value: unknown): string => (typeof value === "string" ? value : JSON.stringify(value) ?? "");

/** The fields of the configs that differ, at most ten; a list field counts as a whole. */
function fieldsOf(run: TuningRun): string[] {
  const values = new Map<string, Set<string>>();
  for (const config of run.rows.config) for (const [name, value] of Object.entries(config)) values.set(name, (values.get(name) ?? new Set()).add(text(value)));
  return [...values].filter(([, each]) => each.size > 1).map(([name]) => name).slice(0, 10);
}

/** Places of a field's values on its axis: numbers in their order, the rest as they come. */
function scaleOf(values: unknown[]): Map<string, number> {
  const distinct = [...new Map(values.map((value) => [text(value), value])).entries()];
  if (distinct.every(([, value]) => typeof value === "number")) distinct.sort((a, b) => (a[1] as number) - (b[1] as number));
  return new Map(distinct.map(([name], at) => [name, distinct.length > 1 ? at / (distinct.length - 1) : 0.5]));
}

function timed(run: TuningRun): number[] {
  return [...run.rows.status.keys()].filter((at) => run.rows.ms[at] !== null).sort((a, b) => run.rows.ms[a]! - run.rows.ms[b]!);
}

function parallel(run: TuningRun): HTMLElement {
  const fields = fieldsOf(run);
  const shown = timed(run).reverse(); // the fastest on top
  if (!fields.length || !shown.length) return h("p", { class: "note" }, "No two timed configs differ in a field, so there are no coordinates to draw.");
  const scales = new Map(fields.map((name) => [name, scaleOf(shown.map((at) => run.rows.config[at]![name]))]));
  const data = shown.flatMap((at) => fields.map((field) => ({ at, field, place: scales.get(field)!.get(text(run.rows.config[at]![field])) ?? null, ms: run.rows.ms[at]! })));
  const ticks = fields.flatMap((field) => [...scales.get(field)!].slice(0, 24).map(([name, place]) => ({ field, place, name: name.slice(0, 16) })));
  const caption = `${shown.length} timed configs, a line each; dark is fast.`;
  return figure(`parallel coordinates of ${shown.length} configs over ${fields.join(", ")}`, caption, {
    width: 920, height: 340, marginLeft: 60, marginRight: 110, marginTop: 36, marginBottom: 16, x: { type: "point", domain: fields, label: null, axis: "top" }, y: { axis: null, domain: [0, 1] },
    color: { type: "log", scheme: "viridis", label: "ms", legend: true, tickFormat: number },
    marks: [
      lines(data, { x: "field", y: "place", z: "at", stroke: "ms", strokeOpacity: 0.7 }),
      Plot.ruleX(fields, { stroke: "var(--dim)" }),
      Plot.text(ticks, { x: "field", y: "place", text: "name", dx: 6, textAnchor: "start", fill: "var(--text)", stroke: "var(--back)" }),
    ],
  });
}

interface Curve {
  run: string;
  at: number;
  ms: number;
  best: number;
}

function curve(run: TuningRun, name: string): Curve[] {
  let best = Infinity;
  return run.rows.ms.flatMap((ms, at): Curve[] => {
    if (ms === null) return [];
    best = Math.min(best, ms);
    return [{ run: name, at: at + 1, ms, best }];
  });
}

function bestSoFar(run: TuningRun, other?: TuningRun): HTMLElement {
  const data = [...curve(run, "this run"), ...(other ? curve(other, "the other run") : [])];
  return figure("best so far", "The best time so far against the number of attempts; dots are attempts.", {
    width: 920, height: 280, marginLeft: 70, x: { label: "attempt", grid: true }, y: { type: "log", label: "ms", grid: true, tickFormat: number }, color: { legend: Boolean(other), domain: ["this run", "the other run"], range: ["var(--order)", "var(--heard)"] },
    marks: [dots(data, { x: "at", y: "ms", fill: "run", r: 2, fillOpacity: 0.45 }), lines(data, { x: "at", y: "best", stroke: "run", curve: "step-after", strokeWidth: 2 })],
  });
}

function timeTable(runs: TuningRun[]): HTMLElement {
  const rows = runs.map((run): Cell[] => {
    const compiled = run.rows.compile_s.reduce<number>((sum, each) => sum + (each ?? 0), 0);
    const statuses = [...Map.groupBy(run.rows.status, (each) => each)].map(([name, all]) => `${all.length} ${name}`).join(", ");
    const failed = run.rows.status.filter((each) => each !== "ok" && each !== "compiled").length;
    return [run.kernel, number(run.seconds), number(compiled), run.seconds ? percent(compiled, run.seconds) : "–", number(run.seconds && run.rows.status.length ? run.seconds / run.rows.status.length : null), statuses, percent(failed, run.rows.status.length)];
  });
  return table("Where the time went", ["run", "seconds", "compiling, all workers", "of the run", "s per attempt", "attempts", "failed or skipped"], rows);
}

export function bestOf(run: TuningRun): { ms: number; config: Record<string, unknown> } | undefined {
  const at = timed(run)[0];
  return at === undefined ? undefined : { ms: run.rows.ms[at]!, config: run.rows.config[at]! };
}

function changes(before: TuningRun, after: TuningRun): HTMLElement {
  const [old, young] = [bestOf(before), bestOf(after)];
  const fields = [...new Set([...Object.keys(old?.config ?? {}), ...Object.keys(young?.config ?? {})])];
  const rows: Cell[][] = [["best, ms", number(old?.ms), number(young?.ms)], ["attempts", before.rows.status.length, after.rows.status.length], ["seconds", number(before.seconds), number(after.seconds)]];
  for (const field of fields) {
    const [a, b] = [text(old?.config[field]), text(young?.config[field])];
    rows.push([field, a, a === b ? b : h("strong", {}, b)]);
  }
  return table("The best configs of both runs", ["", "the other run", "this run"], rows);
}

function attempts(run: TuningRun): HTMLElement {
  const { status, ms, low_ms, high_ms, compile_s, config, error } = run.rows;
  const order = [...timed(run), ...[...status.keys()].filter((at) => ms[at] === null)];
  const row = (at: number): Cell[] => [at + 1, status[at], number(ms[at]), number(low_ms[at]), number(high_ms[at]), number(compile_s[at]), Object.entries(config[at]!).map(([name, value]) => `${name}=${text(value)}`).join(", "), error[at]];
  return table("Attempts, the fastest first", ["attempt", "status", "ms", "10 %", "90 %", "compiled in s", "config", "error"], { length: order.length, at: (place) => row(order[place]!) });
}
