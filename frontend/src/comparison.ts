// Two reports: what got better, what got worse.

import { benchDiff, type Change } from "./benchmarks";
import { summarise } from "./critical";
import { h, number, table, type Cell } from "./dom";
import type { Check, Finding, Prediction, Report, Section } from "./model";
import { bestOf } from "./tuning";

type Differ<K extends Section["kind"]> = (before: Extract<Section, { kind: K }>["data"], after: Extract<Section, { kind: K }>["data"]) => Change[];

const DIFFERS: { [K in Section["kind"]]: Differ<K> } = {
  check: checks,
  bench: benchDiff,
  trace: (before, after) => {
    const old = new Map(summarise(before).map((each) => [each.rank, each]));
    return summarise(after).flatMap((each) => times(`rank ${each.rank}, length in ${after.unit}`, old.get(each.rank)?.length, each.length));
  },
  summary: () => [],
  probe: (before, after) => {
    const old = new Map(before.rows.map((row) => [row.name, row]));
    return after.rows.flatMap((row) => {
      const was = old.get(row.name);
      if (!was || was.verdict === row.verdict) return [];
      return [{ mark: row.verdict === row.expected ? "better" as const : "worse" as const, what: row.name, before: was.verdict, after: row.verdict }];
    });
  },
  isa: (before, after) => {
    const key = (each: { op: string; name: string; target: string }) => `${each.op} ${each.name} ${each.target}`;
    const old = new Map(before.kernels.map((kernel) => [key(kernel), kernel]));
    return after.kernels.flatMap((kernel) => {
      const was = old.get(key(kernel));
      return was ? [...times(`${key(kernel)}, registers`, was.registers, kernel.registers), ...times(`${key(kernel)}, spilled bytes`, was.spills, kernel.spills), ...times(`${key(kernel)}, marks`, was.marks.length, kernel.marks.length)] : [];
    });
  },
  predict: (before, after) => {
    const key = (point: Prediction) => `${point.machine} ${point.problem}`;
    const old = new Map(before.points.map((point) => [key(point), point]));
    return after.points.flatMap((point) => times(key(point), fastestOf(old.get(key(point))), fastestOf(point)));
  },
  tuning: (before, after) => {
    const old = new Map(before.runs.map((run) => [`${run.kernel} ${run.problem}`, run]));
    return after.runs.flatMap((run) => {
      const was = old.get(`${run.kernel} ${run.problem}`);
      return was ? times(`${run.kernel} ${run.problem}, best in ms`, bestOf(was)?.ms, bestOf(run)?.ms) : [];
    });
  },
  ir: () => [],
};

function fastestOf(point?: Prediction): number | undefined {
  return point && Math.min(...Object.values(point.times).map(({ seconds }) => seconds * 1e6));
}

/** A figure of which less is better; less than 3 % is no change. */
function times(what: string, before?: number, after?: number): Change[] {
  if (before === undefined || after === undefined) return [];
  const mark = after < before * 0.97 ? "better" : after > before * 1.03 ? "worse" : "same";
  return [{ mark, what, before: number(before), after: number(after) }];
}

function name(finding: Finding): string {
  const sides = [finding.first, finding.second].flatMap((side) => (side ? [`${side.file}:${side.line}`] : []));
  return `${finding.kind}${finding.rule && `: ${finding.rule}`}${sides.length ? ` (${sides.join(", ")})` : ""}`;
}

function checks(before: Check, after: Check): Change[] {
  const [old, young] = [before, after].map((check) => new Set(check.findings.map(name))) as [Set<string>, Set<string>];
  const survivors = (check: Check) => check.mutants.filter((each) => !each.killed_by && !each.accepted).length;
  return [
    ...[...young].filter((each) => !old.has(each)).map((what): Change => ({ mark: "worse", what, before: "not found", after: "found" })),
    ...[...old].filter((each) => !young.has(each)).map((what): Change => ({ mark: "better", what, before: "found", after: "not found" })),
    ...[...young].filter((each) => old.has(each)).map((what): Change => ({ mark: "same", what, before: "found", after: "found" })),
    ...(after.mutants.length && before.mutants.length ? times("mutants that survived", survivors(before), survivors(after)) : []),
  ];
}

/** The section of the old report that this one continues: the same name, else the only one of its kind. */
function counterpart(report: Report, section: Section): Section | undefined {
  const same = report.sections.filter((each) => each.kind === section.kind);
  const named = same.filter((each) => each.name === section.name);
  return named[0] ?? (same.length === 1 ? same[0] : undefined);
}

export function comparison(report: Report): Node[] {
  const before = report.before!;
  const rows: [Change, Section][] = [];
  const alone: string[] = [];
  for (const section of report.sections) {
    const old = counterpart(before, section);
    if (!old) alone.push(`${section.kind} ${section.name} is only in the new report`);
    else for (const change of (DIFFERS[section.kind] as (before: unknown, after: unknown) => Change[])(old.data, section.data)) rows.push([change, section]);
  }
  for (const old of before.sections) if (!counterpart(report, old)) alone.push(`${old.kind} ${old.name} is only in the old report`);
  const order = { worse: 0, better: 1, same: 2 };
  rows.sort(([a], [b]) => order[a.mark] - order[b.mark]);
  const count = (mark: Change["mark"]) => rows.filter(([change]) => change.mark === mark).length;
  const cells = rows.map(([change, section]): Cell[] => [h("span", { class: change.mark }, change.mark), section.kind, section.name, change.what, change.before, change.after]);
  return [
    h("p", {}, `${report.old_name} (${before.made}) to ${report.new_name} (${report.made}): `, h("span", { class: "better" }, `${count("better")} better`), ", ", h("span", { class: "worse" }, `${count("worse")} worse`), `, ${count("same")} the same.`),
    ...alone.map((each) => h("p", { class: "note" }, each)), table("What changed", ["", "from", "file", "what", "before", "after"], cells, 1000),
  ];
}
