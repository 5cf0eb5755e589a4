// The probe's table: what can be captured in a graph, and why not.

import { h, table, type Cell } from "./dom";
import { of, type Probe, type ProbeRow, type Report } from "./model";

export function capture(report: Report): Node[] {
  return of(report, "probe").flatMap(({ name, data }) => [
    h("p", {}, `${name}: ${data.world} ranks on ${data.backend}, ${data.replays} replays.`), verdicts(data), ...causes(data),
  ]);
}

function verdicts(probe: Probe): HTMLElement {
  const columns = [...new Set(probe.rows.flatMap((row) => Object.keys(row.columns)))];
  const rows = probe.rows.map((row): Cell[] => [
    row.name, h("span", { class: `verdict ${row.verdict === row.expected ? "good" : "bad"}` }, row.verdict, row.verdict === row.expected && row.verdict !== "CAPTURABLE" ? " (expected)" : ""),
    ...columns.map((column) => cell(row, column)),
  ]);
  return table("Verdicts of the probe", ["op", "verdict", ...columns], rows, 500);
}

function cell(row: ProbeRow, column: string): Cell {
  const found = row.columns[column];
  if (!found) return "–";
  return found.verdict === "CAPTURABLE" ? "ok" : h("span", { class: "bad" }, found.verdict.toLowerCase());
}

/** Why something was not captured, or came out wrong: the reason, the line, and the whole text. */
function causes(probe: Probe): Node[] {
  const rows = probe.rows.flatMap((row) =>
    Object.entries(row.columns).filter(([, each]) => each.verdict !== "CAPTURABLE").map(([column, each]): Cell[] => [
      row.name, column, each.verdict, String(each.reason ?? ""), h("code", {}, String(each.where ?? "")), String(each.detail ?? ""), Number(each.replay) >= 0 ? String(each.replay) : "",
    ]));
  return rows.length ? [table("Root causes", ["op", "column", "verdict", "reason", "source line", "what happened", "first wrong replay"], rows)] : [];
}
