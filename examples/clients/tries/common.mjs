// What the scripts of node share: settings, and steps that are reported.
import { readFileSync } from "node:fs";

export const url = process.env.BASE_URL;
export const root = url.replace(/\/v1$/, "");
export const model = process.env.MODEL;
export const client = process.env.CLIENT;
export const picture = readFileSync(process.env.PICTURE);
export const dataUrl = `data:image/png;base64,${picture.toString("base64")}`;
/** A document of one page, a yellow rectangle. */
export const pdf = Buffer.from(
  "%PDF-1.4\n1 0 obj <</Type/Catalog/Pages 2 0 R>> endobj\n" +
    "2 0 obj <</Type/Pages/Kids[3 0 R]/Count 1>> endobj\n" +
    "3 0 obj <</Type/Page/Parent 2 0 R/MediaBox[0 0 200 100]/Contents 4 0 R>> endobj\n" +
    "4 0 obj <</Length 24>> stream\n1 1 0 rg 50 20 90 60 re f\nendstream endobj\n" +
    "trailer <</Root 1 0 R/Size 5>>\n%%EOF\n",
);
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
