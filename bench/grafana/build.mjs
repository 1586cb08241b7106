// Bundles page.jsx and Grafana's components into out/.
import { build } from "esbuild";

await build({
  entryPoints: ["page.jsx"],
  bundle: true,
  format: "esm",
  splitting: true,
  outdir: "out",
  minify: true,
  jsx: "automatic",
  define: { "process.env.NODE_ENV": '"production"', global: "globalThis" },
  loader: { ".svg": "dataurl", ".woff": "dataurl", ".woff2": "dataurl", ".ttf": "dataurl" },
  logLevel: "warning",
});
