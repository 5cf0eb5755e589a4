// Elements. Text always goes in as text: nothing here parses markup.

type Child = Node | string | number | null | undefined;
type Attributes = Record<string, string | number | boolean | ((event: never) => void) | undefined>;

const SVG = "http://www.w3.org/2000/svg";

function fill<E extends Element>(element: E, attributes: Attributes, children: Child[]): E {
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") element.addEventListener(name, value as EventListener);
    else if (value !== undefined && value !== false) element.setAttribute(name, value === true ? "" : String(value));
  }
  for (const child of children) {
    if (child !== null && child !== undefined) element.append(child instanceof Node ? child : String(child));
  }
  return element;
}

export function h<K extends keyof HTMLElementTagNameMap>(
  tag: K, attributes: Attributes = {}, ...children: Child[]
): HTMLElementTagNameMap[K] {
  return fill(document.createElement(tag), attributes, children);
}

export function s<K extends keyof SVGElementTagNameMap>(
  tag: K, attributes: Attributes = {}, ...children: Child[]
): SVGElementTagNameMap[K] {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

export type Cell = string | number | Node | null | undefined;

/** Rows that are there, or that are made when they are shown. */
export type Rows = Cell[][] | { length: number; at: (row: number) => Cell[] | undefined };

/** A table in a frame that scrolls; `most` rows are shown at first, and a button shows as many more. */
export function table(caption: string, heads: string[], rows: Rows, most = 200): HTMLElement {
  const body = h("tbody");
  const frame = h(
    "div", { class: "scroll", tabindex: 0, role: "region", "aria-label": caption },
    h(
      "table", {}, h("caption", {}, caption),
      h("thead", {}, h("tr", {}, ...heads.map((head) => h("th", { scope: "col" }, head)))), body,
    ),
  );
  const more = button("", () => add());
  function add(): void {
    const end = Math.min(body.childElementCount + most, rows.length);
    for (let at = body.childElementCount; at < end; at++) body.append(h("tr", {}, ...rows.at(at)!.map((cell) => h("td", {}, cell ?? ""))));
    more.textContent = `Show more: ${rows.length - end} rows are left`;
    if (end === rows.length) more.remove();
  }
  if (rows.length > most) frame.append(more);
  add();
  return frame;
}

/** A labelled choice; `chosen` is called with the number of the choice, at first for `first`. */
export function choice(label: string, names: string[], chosen: (at: number) => void, first = 0): HTMLElement {
  const options = names.map((name, at) => h("option", { value: at, selected: at === first }, name));
  const select = h("select", { change: () => chosen(Number(select.value)) }, ...options);
  return h("label", { class: "choice" }, `${label} `, select);
}

export function button(name: string, press: () => void, title = ""): HTMLButtonElement {
  return h("button", { type: "button", click: press, title: title || undefined }, name);
}

/** Source lines with numbers; `marked` gives a line's class, `press` is called with its number. */
export function listing(
  file: string, first: number, lines: string[], marked: (line: number) => string, press?: (line: number) => void,
): HTMLElement {
  const rows = lines.map((text, at) => {
    const line = first + at;
    const number = press ? h("button", { type: "button", class: "line", click: () => press(line) }, line) : line;
    const row = h("li", { class: marked(line), "data-line": line }, h("span", { class: "number" }, number), h("code", {}, text));
    return row;
  });
  return h(
    "div", { class: "listing scroll", tabindex: 0, role: "region", "aria-label": `source of ${file}` },
    h("div", { class: "file" }, file), h("ol", {}, ...rows),
  );
}

/** Save text as a file, without a network. */
export function save(name: string, text: string, type = "application/json"): void {
  const url = URL.createObjectURL(new Blob([text], { type }));
  h("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}

const colours = new Map<string, string>();
const painted = new Set<{ node: Element; paint: () => void }>();

/** Paint again whenever the colours change, as long as `node` is in the page. */
export function onColours(node: Element, paint: () => void): void {
  painted.add({ node, paint });
}

function repaint(): void {
  colours.clear();
  for (const each of painted) {
    if (each.node.isConnected) each.paint();
    else painted.delete(each);
  }
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", repaint);

/** Paper is white: printing takes the light colours. */
export function printing(now: boolean): void {
  document.documentElement.toggleAttribute("data-printing", now);
  repaint();
}

/** A colour of the style, for a canvas; asked for once: a drawing has thousands of marks. */
export function colour(name: string): string {
  if (!colours.has(name)) colours.set(name, getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim() || "gray");
  return colours.get(name)!;
}

const digits = new Intl.NumberFormat("en", { maximumSignificantDigits: 4 });
export function number(value: number | null | undefined): string {
  return value === null || value === undefined || Number.isNaN(value) ? "–" : digits.format(value);
}

export function percent(part: number, whole: number): string {
  return whole > 0 ? `${Math.round((100 * part) / whole)} %` : "–";
}
