// The page: reads the data, makes a tab for every view that has something to show.

import "./report.css";
import { benchmarks } from "./benchmarks";
import { capture } from "./capture";
import { comparison } from "./comparison";
import { h, printing } from "./dom";
import { irGraph } from "./ir";
import { of, type Report } from "./model";
import { overview } from "./overview";
import { race } from "./race";
import { timeline } from "./timeline";
import { tuning } from "./tuning";

interface View {
  name: string;
  has: (report: Report) => boolean;
  draw: (report: Report) => Node[];
}

const VIEWS: View[] = [
  { name: "Comparison", has: (report) => report.before !== undefined, draw: comparison },
  { name: "Overview", has: () => true, draw: overview },
  { name: "Race view", has: (report) => of(report, "check").some(({ data }) => data.findings.length + data.remarks.length), draw: race },
  { name: "Timeline", has: (report) => of(report, "trace").length > 0, draw: timeline },
  { name: "IR graph", has: (report) => of(report, "ir").length > 0, draw: irGraph },
  { name: "Tuning", has: (report) => of(report, "tuning").length > 0, draw: tuning },
  { name: "Benchmarks", has: (report) => of(report, "bench").length + of(report, "predict").length > 0, draw: benchmarks },
  { name: "Capture", has: (report) => of(report, "probe").length > 0, draw: capture },
];

async function load(): Promise<Report> {
  const element = document.getElementById("data")!;
  const text = element.textContent!;
  if (element.dataset.packed !== "gzip") return JSON.parse(text);
  const bytes = Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}

/** Tabs as the ARIA practices describe them: arrows move, each panel is drawn when first shown. */
function tabs(report: Report): Node[] {
  const views = VIEWS.filter((view) => view.has(report));
  const drawn = new Set<number>();
  const panels = views.map((view, at) =>
    h("section", { role: "tabpanel", id: `panel${at}`, "aria-labelledby": `tab${at}`, tabindex: 0, hidden: true }, h("h2", {}, view.name)));
  const buttons = views.map((view, at) =>
    h("button", { type: "button", role: "tab", id: `tab${at}`, "aria-controls": `panel${at}`, click: () => show(at) }, view.name));

  function draw(at: number): void {
    if (drawn.has(at)) return;
    drawn.add(at);
    panels[at]!.append(...views[at]!.draw(report));
  }

  function show(at: number): void {
    for (const [other, panel] of panels.entries()) {
      panel.hidden = other !== at;
      buttons[other]!.setAttribute("aria-selected", String(other === at));
      buttons[other]!.tabIndex = other === at ? 0 : -1;
    }
    draw(at);
  }

  const list = h("div", {
    role: "tablist", "aria-label": "views",
    keydown: (event: KeyboardEvent) => {
      const here = buttons.indexOf(document.activeElement as HTMLButtonElement);
      const steps: Record<string, number> = { ArrowRight: here + 1, ArrowLeft: here - 1, Home: 0, End: views.length - 1 };
      const next = steps[event.key];
      if (next === undefined) return;
      event.preventDefault();
      const at = (next + views.length) % views.length;
      buttons[at]!.focus();
      show(at);
    },
  }, ...buttons);
  window.addEventListener("beforeprint", () => {
    views.forEach((_, at) => draw(at));
    printing(true);
  });
  window.addEventListener("afterprint", () => printing(false));
  show(0);
  return [list, ...panels];
}

function footer(report: Report): Node {
  const licences = document.getElementById("licences")!.textContent!;
  return h(
    "footer", {}, h("p", {}, `Written by sundog ${report.sundog}, ${report.made}.`),
    h("details", {}, h("summary", {}, "Licences of the software in this page"), h("pre", { tabindex: 0 }, licences)),
  );
}

const page = document.getElementById("page")!;
load().then(
  (report) => page.append(h("header", {}, h("h1", {}, "sundog report")), ...tabs(report), footer(report)),
  (error) => page.append(h("p", { role: "alert" }, `The data of this page cannot be read: ${error}`)),
);
