// Times and problems of benchmarks: medians, spreads, the axis along which problems differ.

import { quantileSorted } from "d3";
import type { Bench, BenchRow } from "./model";

export interface Times {
  median: number;
  low: number; // 20 %
  high: number; // 80 %
}

export function timesOf(samples: number[]): Times | undefined {
  if (!samples.length) return undefined;
  const sorted = [...samples].sort((a, b) => a - b);
  const at = (part: number) => quantileSorted(sorted, part)!;
  return { median: at(0.5), low: at(0.2), high: at(0.8) };
}

export interface Best {
  row: BenchRow;
  times: Times;
}

/** Of each variant on each problem the fastest config. */
export function fastest(bench: Bench): Best[] {
  const found = new Map<string, Best>();
  for (const row of bench.rows) {
    const times = timesOf(row.samples_ns);
    const key = `${row.problem}\n${row.variant}`;
    if (times && times.median < (found.get(key)?.times.median ?? Infinity)) found.set(key, { row, times });
  }
  return [...found.values()];
}

export function problemText(problem: string): string {
  return problem.replace(/^Problem\(|\)$/g, "").replaceAll("torch.", "");
}

export function fieldsOf(problem: string): Map<string, string> {
  return new Map(problemText(problem).split(/, ?/).map((each) => each.split("=", 2) as [string, string]));
}

/** The numeric field in which the problems differ most, and the rest of each problem. */
export function axisOf(problems: string[]): string {
  const values = new Map<string, Set<string>>();
  for (const problem of problems) {
    for (const [name, value] of fieldsOf(problem)) {
      if (/^\d+$/.test(value)) values.set(name, (values.get(name) ?? new Set()).add(value));
    }
  }
  return [...values].sort((a, b) => b[1].size - a[1].size)[0]?.[0] ?? "";
}

export function restOf(problem: string, axis: string): string {
  return [...fieldsOf(problem)].filter(([name]) => name !== axis).map(([name, value]) => `${name}=${value}`).join(", ");
}

export interface Point {
  at: number;
  name: string;
  time: number;
}

/** Where another one becomes the fastest, in sentences. */
export function crossings(points: Point[], axis: string): string[] {
  const best = new Map<number, Point>();
  for (const point of points) if (point.time < (best.get(point.at)?.time ?? Infinity)) best.set(point.at, point);
  const ordered = [...best.values()].sort((a, b) => a.at - b.at);
  return ordered.slice(1).flatMap((point, before) => {
    const last = ordered[before]!;
    return last.name === point.name ? [] : [`${last.name} is the fastest up to ${axis}=${last.at}, ${point.name} from ${point.at} on.`];
  });
}
