// Bundle the page: one script, one style, and the licences of what is inside the script.
import { build } from "esbuild";
import { existsSync, mkdirSync, readdirSync, readFileSync, writeFileSync } from "node:fs";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";

const here = dirname(fileURLToPath(import.meta.url));
const out = join(here, "..", "sundog", "report", "assets");
mkdirSync(out, { recursive: true });

const { metafile } = await build({
  absWorkingDir: here,
  entryPoints: { report: "src/main.ts" },
  bundle: true,
  minify: true,
  format: "iife",
  target: "es2022",
  legalComments: "none", // the licences are listed whole, below
  outdir: out,
  metafile: true,
});

/** The package that a bundled file belongs to: node_modules/name or node_modules/@scope/name. */
function packageOf(file) {
  const found = /^node_modules\/(@[^/]+\/[^/]+|[^/]+)\//.exec(file);
  return found?.[1];
}

const names = [...new Set(Object.keys(metafile.inputs).map(packageOf).filter(Boolean))].sort();
const texts = names.map((name) => {
  const folder = join(here, "node_modules", name);
  const { version, license } = JSON.parse(readFileSync(join(folder, "package.json"), "utf8"));
  const file = readdirSync(folder).find((each) => /^licen[cs]e/i.test(each));
  const text = file && existsSync(join(folder, file)) ? readFileSync(join(folder, file), "utf8") : "";
  return `${name} ${version}, ${license}\n\n${text.trim()}\n`;
});
writeFileSync(join(out, "licences.txt"), texts.join("\n" + "-".repeat(72) + "\n"));
console.log(`${names.length} packages in ${out}`);
