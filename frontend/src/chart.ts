// A chart of Observable Plot in a figure, with a name for those who cannot see it.

import * as Plot from "@observablehq/plot";
import { h } from "./dom";

export function figure(label: string, caption: string, options: Plot.PlotOptions): HTMLElement {
  const style = { background: "transparent", color: "var(--text)", fontSize: "12px", overflow: "visible" };
  const drawn = Plot.plot({ width: 860, marginLeft: 70, style, ...options });
  const all = drawn instanceof SVGElement ? [drawn] : [...drawn.querySelectorAll("svg")];
  for (const svg of all) svg.setAttribute("aria-hidden", "true"); // legends
  for (const part of drawn.querySelectorAll("g[aria-label]")) part.removeAttribute("aria-label"); // not allowed there
  const chart = all.at(-1)!;
  chart.removeAttribute("aria-hidden");
  chart.setAttribute("role", "img");
  chart.setAttribute("aria-label", label);
  return h("figure", {}, drawn, h("figcaption", {}, caption));
}
