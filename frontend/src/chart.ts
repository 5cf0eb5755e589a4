// A chart of Observable Plot in a figure, with a name for those who cannot see it.

import * as Plot from "@observablehq/plot";
import { colour, h, onColours, s } from "./dom";
import { MOST_ELEMENTS } from "./surface";

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

type Channels = { x?: ArrayLike<number>; y?: ArrayLike<number>; z?: ArrayLike<unknown>; stroke?: ArrayLike<string>; fill?: ArrayLike<string> };
type Paint = (context: CanvasRenderingContext2D, index: number[], channels: Channels) => void;

/** Lines through points, as elements, or on a canvas above 2,000 points. Plot makes the scales of both. */
export function lines<T>(data: T[], options: Plot.LineOptions): Plot.Markish {
  return Plot.line(data, data.length > MOST_ELEMENTS ? { ...options, render: onCanvas(paintLines, Number(options.strokeOpacity ?? 1)) } : options);
}

/** Dots, as elements, or on a canvas above 2,000 of them. */
export function dots<T>(data: T[], options: Plot.DotOptions): Plot.Markish {
  return Plot.dot(data, data.length > MOST_ELEMENTS ? { ...options, render: onCanvas(paintDots, Number(options.fillOpacity ?? 1)) } : options);
}

function onCanvas(paint: Paint, opacity: number): Plot.RenderFunction {
  return (index, _scales, values, { width, height }) => {
    const scale = Math.min(window.devicePixelRatio || 1, 2);
    const canvas = h("canvas", { width: width * scale, height: height * scale, style: `width:${width}px;height:${height}px` });
    const context = canvas.getContext("2d")!;
    const draw = () => {
      context.setTransform(scale, 0, 0, scale, 0, 0);
      context.clearRect(0, 0, width, height);
      context.globalAlpha = opacity;
      paint(context, index as unknown as number[], values as Channels);
    };
    draw();
    onColours(canvas, draw);
    return s("foreignObject", { width, height }, canvas);
  };
}

/** A canvas does not know the names of the style's colours. */
function known(name: string): string {
  const found = /^var\(--(.+)\)$/.exec(name);
  return found ? colour(found[1]!) : name;
}

const paintLines: Paint = (context, index, { x, y, z, stroke }) => {
  for (const line of Map.groupBy(index, (at) => z?.[at]).values()) {
    context.strokeStyle = known(stroke?.[line[0]!] ?? "var(--text)");
    context.beginPath();
    for (const at of line) context.lineTo(x![at]!, y![at]!);
    context.stroke();
  }
};

const paintDots: Paint = (context, index, { x, y, fill }) => {
  for (const at of index) {
    context.fillStyle = known(fill?.[at] ?? "var(--text)");
    context.fillRect(x![at]! - 1.5, y![at]! - 1.5, 3, 3);
  }
};
