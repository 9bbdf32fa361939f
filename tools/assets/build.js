// Bundles entry.js into ../src/qkeel/report/assets/plot.min.js.xz, with the licence of everything that went in. Needs xz.
import {execFileSync} from "node:child_process";
import {existsSync, readFileSync, writeFileSync} from "node:fs";
import {build} from "esbuild";

const target = "../src/qkeel/report/assets/plot.min.js";

const result = await build({
  entryPoints: ["entry.js"],
  bundle: true,
  minify: true,
  format: "iife",
  globalName: "Plot",
  target: "es2020",
  charset: "ascii", // a page in any encoding can hold it
  legalComments: "none", // the notices are gathered below
  metafile: true,
  write: false
});

// Packages with the same text of a licence share it.
const licences = new Map();
for (const path of Object.keys(result.metafile.inputs)) {
  const folder = path.match(/^node_modules\/(@[^/]+\/)?[^/]+/)?.[0];
  if (!folder) continue;
  const {name, version} = JSON.parse(readFileSync(`${folder}/package.json`, "utf8"));
  const file = ["LICENSE", "LICENSE.md", "LICENSE.txt"].map((n) => `${folder}/${n}`).find(existsSync);
  if (!file) throw new Error(`${name} has no licence file; do not ship it`);
  const text = readFileSync(file, "utf8").replace(/\r/g, "").trim();
  if (!licences.has(text)) licences.set(text, new Set());
  licences.get(text).add(`${name} ${version}`);
}
const notices = [...licences].map(([text, names]) => `${[...names].sort().join(", ")}\n\n${text}`);
const banner = `/*! This bundle holds the following software.\n\n${notices.sort().join("\n\n---\n\n")}\n*/\n`;
const code = banner + new TextDecoder().decode(result.outputFiles[0].contents);
if (/<\/script|<!--/i.test(code)) throw new Error("the bundle would end or confuse the script element that holds it");

writeFileSync(target, code);
execFileSync("xz", ["-9e", "--force", target]);
console.log(`${target}.xz, unpacked: ${(code.length / 1024).toFixed(0)} KB, ${licences.size} licence texts`);
