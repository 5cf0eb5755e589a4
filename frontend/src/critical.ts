// What a trace adds up to: each rank's time by what it did, and the chain that made it as long as it is.

import type { Trace } from "./model";

export interface Part {
  span: number;
  begin: number;
  end: number;
  /** The arrow that led to this part from another program, or undefined. */
  arrow?: number;
}

export interface Rows {
  /** By row: its rank and its program, in this order. */
  names: [rank: number, program: number][];
  ofSpan: Int32Array;
  /** By arrow: the rows of its two ends; -1: no span is there. */
  ofArrow: Int32Array;
  /** The rows of a rank, or all: from, and up to. */
  range: (rank?: number) => [number, number];
}

const nameOf = (rank: number, program: number) => rank * 2 ** 32 + program;

/** A row for each program. Numbers, since text as a key takes a second for 100,000 spans. */
export function rowsOf({ spans, arrows }: Trace): Rows {
  const distinct = new Map<number, [number, number]>();
  for (let at = 0; at < spans.rank.length; at++) {
    const name = nameOf(spans.rank[at]!, spans.program[at]!);
    if (!distinct.has(name)) distinct.set(name, [spans.rank[at]!, spans.program[at]!]);
  }
  const names = [...distinct.values()].sort((a, b) => a[0] - b[0] || a[1] - b[1]);
  const rows = new Map(names.map(([rank, program], row) => [nameOf(rank, program), row]));
  const rowOf = (rank: number, program: number) => rows.get(nameOf(rank, program)) ?? -1;
  return {
    names,
    ofSpan: Int32Array.from(spans.rank, (rank, at) => rowOf(rank, spans.program[at]!)),
    ofArrow: Int32Array.from(arrows.flatMap(([r1, p1, , r2, p2]) => [rowOf(r1, p1), rowOf(r2, p2)])),
    range: (rank) => rank === undefined ? [0, names.length] : [names.findIndex((name) => name[0] === rank), names.findLastIndex((name) => name[0] === rank) + 1],
  };
}

/** The last span of a lane, in the order of their begins, that begins by `time`. */
function lastBegun(lane: number[], begin: number[], time: number): number {
  let [low, high] = [0, lane.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (begin[lane[middle]!]! <= time) low = middle + 1;
    else high = middle;
  }
  return low - 1;
}

const close = (time: number) => Math.round(time * 1000); // times are quotients: equal up to rounding

/** Walk back from what ended last: through the arrow that ended a wait, else along the program. */
export function criticalPath(trace: Trace): Part[] {
  const { spans, arrows } = trace;
  const rows = rowsOf(trace);
  const lanes: number[][] = rows.names.map(() => []);
  for (let at = 0; at < spans.rank.length; at++) lanes[rows.ofSpan[at]!]!.push(at);
  for (const lane of lanes) lane.sort((a, b) => spans.begin[a]! - spans.begin[b]!);
  const into: Map<number, number>[] = rows.names.map(() => new Map());
  arrows.forEach(([, , , , , time], at) => into[rows.ofArrow[2 * at + 1]!]?.set(close(time), at));
  const endOf = (at: number) => spans.begin[at]! + spans.length[at]!;
  let span = 0;
  for (let at = 1; at < spans.rank.length; at++) if (endOf(at) > endOf(span)) span = at;
  const path: Part[] = [];
  let until = endOf(span);
  while (path.length < spans.rank.length) {
    const row = rows.ofSpan[span]!;
    const arrow = into[row]!.get(close(endOf(span)));
    let next: number | undefined;
    if (arrow !== undefined && close(until) === close(endOf(span))) {
      const time = arrows[arrow]![2];
      path.push({ span, begin: Math.max(time, spans.begin[span]!), end: until, arrow });
      until = time;
      const lane = lanes[rows.ofArrow[2 * arrow]!] ?? [];
      next = lane[lastBegun(lane, spans.begin, time + 1e-6)];
      if (next !== undefined && endOf(next) > time) until = Math.max(time, spans.begin[next]!);
    } else {
      path.push({ span, begin: spans.begin[span]!, end: until });
      const lane = lanes[row]!;
      const here = spans.begin[span]! + 1e-6;
      let at = lastBegun(lane, spans.begin, here);
      while (at >= 0 && (lane[at] === span || endOf(lane[at]!) > here)) at--;
      next = lane[at];
      if (next !== undefined) until = endOf(next);
    }
    if (next === undefined || next === span) break;
    span = next;
  }
  return path.reverse().filter(({ begin, end }) => end > begin); // a signal at a span's begin takes none of it
}

type Interval = [begin: number, end: number];

/** Disjoint intervals that cover the same time. */
function union(intervals: Interval[]): Interval[] {
  const merged: Interval[] = [];
  for (const [begin, end] of intervals.sort((a, b) => a[0] - b[0])) {
    const last = merged.at(-1);
    if (last && begin <= last[1]) last[1] = Math.max(last[1], end);
    else merged.push([begin, end]);
  }
  return merged;
}

const total = (intervals: Interval[]) => intervals.reduce((sum, [begin, end]) => sum + end - begin, 0);

function common(a: Interval[], b: Interval[]): number {
  let [at, other, sum] = [0, 0, 0];
  while (at < a.length && other < b.length) {
    const begin = Math.max(a[at]![0], b[other]![0]);
    const end = Math.min(a[at]![1], b[other]![1]);
    if (end > begin) sum += end - begin;
    if (a[at]![1] < b[other]![1]) at++;
    else other++;
  }
  return sum;
}

export interface RankSummary {
  rank: number;
  length: number;
  busy: number; // program time: from each program's first span to its last, added up
  waited: number;
  waitedFor: Map<number, number>;
  compute: number; // time in which some program computed
  link: number;
  both: number;
  onlyWaiting: number; // time in which programs waited and none computed or moved data
}

export function summarise(trace: Trace): RankSummary[] {
  const { spans, kinds } = trace;
  const ranks = [...new Set(spans.rank)].sort((a, b) => a - b);
  const found = new Map(ranks.map((rank) => [rank, { all: [] as Interval[], fetch: [] as Interval[], compute: [] as Interval[], wait: [] as Interval[], programs: new Map<number, Interval>(), waitedFor: new Map<number, number>() }]));
  for (let at = 0; at < spans.rank.length; at++) {
    const of = found.get(spans.rank[at]!)!;
    const time: Interval = [spans.begin[at]!, spans.begin[at]! + spans.length[at]!];
    const kind = kinds[spans.kind[at]!]!;
    of.all.push([...time]);
    if (kind === "fetch") of.fetch.push([...time]);
    if (kind === "compute") of.compute.push([...time]);
    if (kind === "wait" || kind === "barrier") {
      of.wait.push([...time]);
      const peer = spans.ended_by[at]!;
      of.waitedFor.set(peer, (of.waitedFor.get(peer) ?? 0) + time[1] - time[0]);
    }
    const program = of.programs.get(spans.program[at]!);
    of.programs.set(spans.program[at]!, program ? [Math.min(program[0], time[0]), Math.max(program[1], time[1])] : time);
  }
  return ranks.map((rank) => {
    const of = found.get(rank)!;
    const waited = total(of.wait);
    const all = union(of.all);
    const [fetch, compute, wait] = [union(of.fetch), union(of.compute), union(of.wait)];
    const busyTime = union([...fetch, ...compute].map((each): Interval => [...each]));
    return {
      rank, length: all.at(-1)![1] - all[0]![0], busy: total([...of.programs.values()]), waited, waitedFor: of.waitedFor,
      compute: total(compute), link: total(fetch), both: common(fetch, compute), onlyWaiting: total(wait) - common(wait, busyTime),
    };
  });
}
