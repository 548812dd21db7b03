// What the scripts of node share: settings, and steps that are reported.
import { readFileSync } from "node:fs";

export const url = process.env.BASE_URL;
export const root = url.replace(/\/v1$/, "");
export const model = process.env.MODEL;
export const client = process.env.CLIENT;
export const picture = readFileSync(process.env.PICTURE);
export const dataUrl = `data:image/png;base64,${picture.toString("base64")}`;
export const weather = async ({ city }) => `${city === "Rome" ? "sun" : "rain"} in ${city}`;

export async function step(name, work) {
  try {
    await work();
    console.log(`ok ${name}`);
  } catch (error) {
    console.log(error);
    console.log(`FAIL ${name}: ${String(error?.message ?? error).split("\n")[0].slice(0, 300)}`);
    process.exitCode = 1;
  }
}

export function holds(text, ...words) {
  for (const word of words)
    if (!String(text).toLowerCase().includes(word.toLowerCase()))
      throw new Error(`no ${word} in ${JSON.stringify(text)}`);
}
