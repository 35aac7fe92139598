// Run a function of a file of this folder as a program: `node run.mjs FOLDER FILE FUNCTION`. Standard input has the
// question as JSON, and the last line is the answer. Node.js looks for packages beside the file that imports them, so the
// file is copied to the folder in which they are installed.
import { copyFileSync, readFileSync } from "node:fs";
import { basename, join } from "node:path";

const [folder, file, name] = process.argv.slice(2);
const copy = join(folder, basename(file));
copyFileSync(file, copy);
const told = JSON.parse(readFileSync(0, "utf8"));
const program = await import(copy);
console.log(await program[name](told.question, told.base_url, told.api_key));
