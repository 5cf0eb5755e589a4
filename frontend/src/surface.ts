// A drawing of rectangles and lines: elements up to 2,000 marks, a canvas above.

import { h, s } from "./dom";

export const MOST_ELEMENTS = 2000;
const MOST_PIXELS = 32e6; // of a canvas: browsers refuse some, and each takes 4 bytes

export interface Box {
  x: number;
  y: number;
  width: number;
  height: number;
  fill: string;
  title: string;
  index: number;
  round?: boolean;
  outline?: string;
  faint?: boolean;
}

export interface Arrow {
  x1: number;
  y1: number;
  x2: number;
  y2: number;
  stroke: string;
  dashed?: boolean;
  width?: number;
  title?: string;
  faint?: boolean;
}

export interface Word {
  x: number;
  y: number;
  text: string;
  fill: string;
  anchor?: "start" | "middle" | "end";
}

export interface Drawing {
  boxes: Box[];
  arrows: Arrow[];
  words: Word[];
  /** Whether arrows are drawn over the boxes. */
  over?: boolean;
}

export interface Surface {
  node: HTMLElement | SVGElement;
  draw(drawing: Drawing): void;
  /** The box at a point of the surface, the last one drawn first. */
  at(x: number, y: number): number | undefined;
}

/** Make a surface for about this many marks. `press` is called with the index of a box. */
export function surface(
  width: number, height: number, label: string, marks: number, press: (index: number) => void,
): Surface {
  return marks > MOST_ELEMENTS ? canvas(width, height, label, press) : elements(width, height, label, press);
}

function under(boxes: Box[], x: number, y: number): number | undefined {
  for (let at = boxes.length - 1; at >= 0; at--) {
    const box = boxes[at]!;
    if (x >= box.x - 2 && x <= box.x + box.width + 2 && y >= box.y && y <= box.y + box.height) return box.index;
  }
  return undefined;
}

/** The two strokes of an arrow's head, as points. */
function head({ x1, y1, x2, y2 }: Arrow, size = 6): [number, number][] {
  const angle = Math.atan2(y2 - y1, x2 - x1);
  const at = (turn: number): [number, number] =>
    [x2 - size * Math.cos(angle + turn), y2 - size * Math.sin(angle + turn)];
  return [at(0.45), [x2, y2], at(-0.45)];
}

function elements(width: number, height: number, label: string, press: (index: number) => void): Surface {
  const svg = s("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label });
  let shown: Box[] = [];
  return {
    node: svg,
    at: (x, y) => under(shown, x, y),
    draw({ boxes, arrows, words, over }) {
      shown = boxes;
      const lines = arrows.map((each) =>
          s(
            "g", { stroke: each.stroke, "stroke-width": each.width ?? 1, fill: "none", opacity: each.faint ? 0.4 : 1 },
            s("title", {}, each.title ?? ""),
            s("line", { x1: each.x1, y1: each.y1, x2: each.x2, y2: each.y2, "stroke-dasharray": each.dashed ? "6 4" : undefined }),
            s("polyline", { points: head(each).map((point) => point.join(",")).join(" ") }),
          ));
      svg.replaceChildren(
        ...(over ? [] : lines),
        ...boxes.map((box) =>
          s(
            "rect",
            {
              x: box.x, y: box.y, width: Math.max(box.width, 1), height: box.height, fill: box.fill,
              rx: box.round ? box.height / 2 : 0, stroke: box.outline, "stroke-width": box.outline ? 2.5 : undefined,
              opacity: box.faint ? 0.3 : 1, "data-index": box.index, class: "mark", click: () => press(box.index),
            },
            s("title", {}, box.title),
          )),
        ...(over ? lines : []),
        ...words.map((word) => s("text", { x: word.x, y: word.y, fill: word.fill, "text-anchor": word.anchor ?? "start" }, word.text)),
      );
    },
  };
}

function canvas(width: number, height: number, label: string, press: (index: number) => void): Surface {
  const scale = Math.min(window.devicePixelRatio || 1, 2, Math.sqrt(MOST_PIXELS / (width * height)));
  const node = h("canvas", {
    width: Math.round(width * scale), height: Math.round(height * scale), role: "img", "aria-label": label,
    style: `width:${width}px;height:${height}px`,
  });
  const context = node.getContext("2d")!;
  let shown: Box[] = [];
  node.addEventListener("click", (event) => {
    const index = under(shown, event.offsetX, event.offsetY);
    if (index !== undefined) press(index);
  });
  return {
    node,
    at: (x, y) => under(shown, x, y),
    draw({ boxes, arrows, words, over }) {
      shown = boxes;
      context.setTransform(scale, 0, 0, scale, 0, 0);
      context.clearRect(0, 0, width, height);
      if (!over) paintArrows(context, arrows);
      paintBoxes(context, boxes);
      if (over) paintArrows(context, arrows);
      context.globalAlpha = 1;
      context.font = "12px system-ui, sans-serif";
      for (const word of words) {
        context.fillStyle = word.fill;
        context.textAlign = word.anchor === "middle" ? "center" : (word.anchor ?? "start");
        context.fillText(word.text, word.x, word.y);
      }
    },
  };
}

/** Fill all boxes of one look together: to change the colour 100,000 times takes longer than to fill. */
function paintBoxes(context: CanvasRenderingContext2D, boxes: Box[]): void {
  for (const faint of [true, false]) {
    context.globalAlpha = faint ? 0.3 : 1;
    for (const fill of new Set(boxes.map((box) => box.fill))) {
      context.fillStyle = fill;
      for (const box of boxes) {
        if (box.fill === fill && Boolean(box.faint) === faint) context.fillRect(box.x, box.y, Math.max(box.width, 0.75), box.height);
      }
    }
  }
  context.lineWidth = 2.5;
  for (const box of boxes) {
    if (!box.outline) continue;
    context.strokeStyle = box.outline;
    context.strokeRect(box.x, box.y, box.width, box.height);
  }
}

/** Stroke all arrows of one look at once: one by one, 25,000 of them take a second. Of many, heads would cover all. */
function paintArrows(context: CanvasRenderingContext2D, arrows: Arrow[]): void {
  const looks = Map.groupBy(arrows, (each) => `${each.stroke} ${each.width ?? 1} ${Boolean(each.dashed)} ${Boolean(each.faint)}`);
  for (const group of looks.values()) {
    const [look] = group as [Arrow];
    context.globalAlpha = look.faint ? 0.3 : 1;
    context.strokeStyle = look.stroke;
    context.lineWidth = look.width ?? 1;
    context.setLineDash(look.dashed ? [6, 4] : []);
    context.beginPath();
    for (const each of group) {
      context.moveTo(each.x1, each.y1);
      context.lineTo(each.x2, each.y2);
      if (arrows.length > MOST_ELEMENTS) continue;
      for (const [at, point] of head(each).entries()) at === 0 ? context.moveTo(...point) : context.lineTo(...point);
    }
    context.stroke();
  }
  context.setLineDash([]);
}
