// Bundles src/ into the command line's package, and records which sources the bundle was made from.
import { build } from "esbuild";
import { createHash } from "node:crypto";
import { copyFileSync, readFileSync, readdirSync, writeFileSync } from "node:fs";

const out = "../cli/fulcrum_cli/web/page";
await build({
  entryPoints: { page: "src/main.tsx" },
  outdir: out,
  bundle: true,
  minify: true,
  format: "esm",
  target: "es2022",
  jsx: "automatic",
  jsxImportSource: "preact",
  legalComments: "none",
  banner: { js: "/* Built from web/ by `make web`; contains Preact (MIT licence, Jason Miller). */" },
  logLevel: "warning",
});
await build({ entryPoints: ["src/page.css"], outdir: out, minify: true, logLevel: "warning" });
for (const name of ["index.html", "icon.svg"]) copyFileSync(`src/${name}`, `${out}/${name}`);

// In the form of sha256sum, sorted by path; tests/unit/repository/test_live_page_bundle.py compares.
const hash = (path) => createHash("sha256").update(readFileSync(path)).digest("hex");
const sources = ["build.mjs", "package-lock.json", "package.json", "tsconfig.json"];
for (const name of readdirSync("src")) sources.push(`src/${name}`);
const lines = [
  ...sources.map((path) => `${hash(path)}  web/${path}`),
  ...["icon.svg", "index.html", "page.css", "page.js"].map((name) => `${hash(`${out}/${name}`)}  ${out.slice(3)}/${name}`),
];
writeFileSync(`${out}/SHA256SUMS`, lines.sort((a, b) => (a.slice(66) < b.slice(66) ? -1 : 1)).join("\n") + "\n");
