// What was looked at, how it came out, on what machine, and what was not covered.

import { h, number, table, type Cell } from "./dom";
import { of, type Machine, type Report, type Section } from "./model";

interface Line {
  verdict: "good" | "bad" | "plain";
  text: string;
  covered: string;
  not: string;
}

const SAYS: { [K in Section["kind"]]: (section: Extract<Section, { kind: K }>) => Line } = {
  check: ({ data }) => {
    const survived = data.mutants.filter((each) => !each.killed_by && !each.accepted).length;
    const mutants = data.mutants.length ? `, ${data.mutants.length - survived} of ${data.mutants.length} mutants killed or accepted` : "";
    const cut = data.asked !== undefined && data.schedules < data.asked ? `${data.asked - data.schedules} schedules not tried` : "";
    return {
      verdict: data.findings.length || survived ? "bad" : "good",
      text: `${data.findings.length || "no"} findings, ${data.remarks.length} remarks${mutants}`,
      covered: data.coverage || `${data.schedules} schedules, ${data.world ?? "?"} ranks`,
      not: [cut, ...data.notes, data.mutants.length ? "" : "mutants: not asked for"].filter(Boolean).join("; "),
    };
  },
  trace: ({ data }) => ({
    verdict: "plain",
    text: data.title,
    covered: `${data.spans.rank.length} spans, ${data.arrows.length} arrows; ${data.clock}`,
    not: data.dropped ? `${data.dropped} events found no room` : "",
  }),
  summary: ({ data }) => ({ verdict: "plain", text: String(data.title), covered: `${(data.ranks as unknown[]).length} ranks`, not: "the spans: give the trace itself" }),
  bench: ({ data }) => {
    const wrong = data.rows.filter((row) => row.wrong).length;
    return {
      verdict: wrong ? "bad" : "good",
      text: `${data.op}: ${data.rows.length} rows${wrong ? `, ${wrong} wrong or failed` : ""}`,
      covered: `${data.world} ranks on ${data.backend}${data.link && ` over ${data.link}`}`,
      not: data.link ? "ranks other than 0" : "",
    };
  },
  probe: ({ data }) => {
    const bad = data.rows.filter((row) => row.verdict !== row.expected);
    return {
      verdict: bad.length ? "bad" : "good",
      text: bad.length ? `not as expected: ${bad.map((row) => row.name).join(", ")}` : `${data.rows.length} verdicts as expected`,
      covered: `${data.world} ranks on ${data.backend}, ${data.replays} replays`,
      not: "",
    };
  },
  isa: ({ data }) => {
    const marked = data.kernels.filter((kernel) => kernel.marks.length).length;
    const targets = [...new Set(data.kernels.map((kernel) => kernel.target))];
    return { verdict: marked ? "bad" : "good", text: `${data.kernels.length} kernels, ${marked} marked`, covered: targets.join(", "), not: "" };
  },
  predict: ({ data }) => {
    const machines = [...new Set(data.points.map((point) => point.machine))];
    return { verdict: "plain", text: `${data.points.length} predictions`, covered: machines.join(", "), not: "measured on no machine: a model" };
  },
  tuning: ({ data }) => ({
    verdict: data.damage.length ? "bad" : "plain",
    text: `${data.runs.length} tuning runs, ${data.runs.reduce((sum, run) => sum + run.rows.status.length, 0)} attempts`,
    covered: [...new Set(data.runs.map((run) => run.hardware))].join(", "),
    not: [data.left_out ? `${data.left_out} earlier runs` : "", ...data.damage].filter(Boolean).join("; "),
  }),
  ir: ({ data }) => ({
    verdict: "plain",
    text: `${data.graphs.length} IR graphs`,
    covered: "of each run the fastest config's and the first one's",
    not: data.left_out ? `${data.left_out} graphs of other configs` : "",
  }),
};

const WORDS = { good: "✓ fine", bad: "✗ found", plain: "shown" };

function lineOf(section: Section): Line {
  return (SAYS[section.kind] as (section: Section) => Line)(section);
}

/** Good, bad or plain, for the comparison of two reports. */
export function verdictOf(section: Section): string {
  return lineOf(section).text;
}

export function overview(report: Report): Node[] {
  const rows = report.sections.map((section): Cell[] => {
    const line = lineOf(section);
    return [h("span", { class: `verdict ${line.verdict}` }, WORDS[line.verdict]), section.kind, section.name, line.text, line.covered, line.not];
  });
  const found = [table("Verdicts", ["", "from", "file", "result", "covered", "not covered"], rows)];
  const machines = report.sections.flatMap((section): Cell[][] => {
    const machine = machineOf(section);
    return machine ? [[section.name, ...COLUMNS.map((name) => machine[name] ?? "")]] : [];
  });
  if (machines.length) found.push(table("Versions and machines", ["file", ...COLUMNS], machines));
  for (const { name, data } of of(report, "isa")) {
    const kernels = data.kernels.map((kernel): Cell[] => [
      kernel.op, kernel.name, kernel.target, kernel.registers, kernel.spills, number(kernel.shared), kernel.barriers, kernel.tma,
      kernel.marks.map((mark) => `${mark.rule}${mark.where && ` at ${mark.where}`}: ${mark.text}`).join("; "),
    ]);
    found.push(table(`Compiled kernels, ${name}`, ["op", "kernel", "target", "registers", "spilled B", "shared B", "barriers", "TMA", "marked"], kernels));
  }
  for (const { name, data } of of(report, "check")) {
    if (data.mutants.length) found.push(mutants(name, data.mutants));
  }
  return found;
}

const COLUMNS = ["gpu", "torch", "triton", "python", "sundog", "commit", "date", "command"];

function machineOf(section: Section): Machine | undefined {
  if (section.kind === "tuning") {
    const run = section.data.runs[0];
    return run && { gpu: run.hardware, date: run.started_at, ...run.versions };
  }
  return (section.data as { machine?: Machine }).machine;
}

function mutants(name: string, all: import("./model").Mutant[]): HTMLElement {
  const rows = all.map((each): Cell[] => [
    each.killed_by || (each.accepted ? `accepted: ${each.accepted}` : "SURVIVED"), each.schedules, each.where, each.what,
  ]);
  return table(`Mutants, ${name}`, ["killed by", "schedules", "where", "mutant"], rows);
}
