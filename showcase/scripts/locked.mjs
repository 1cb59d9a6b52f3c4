// Every installed package is one of package-lock.json, in the same version and with the same integrity hash.
import { readFileSync } from "node:fs";

const packages = (path) => JSON.parse(readFileSync(path, "utf8")).packages;
const locked = packages("package-lock.json"), installed = packages("node_modules/.package-lock.json");
const strange = Object.entries(installed).filter(([path, { version, integrity }]) =>
  !integrity || locked[path]?.version !== version || locked[path]?.integrity !== integrity);
if (strange.length) {
  const got = strange.map(([path, { version }]) => `${path} ${version}`).join(", ");
  throw new Error(`installed packages differ from package-lock.json: got ${got}; expected the locked versions. Delete node_modules and install again`);
}
console.log(`${Object.keys(installed).length} packages, all as locked`);
