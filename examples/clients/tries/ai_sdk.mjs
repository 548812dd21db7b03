// Vercel's AI SDK by three providers: a picture, a stream, an object, three turns with tools.
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, Output, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";
import { client, holds, model as name, pdf, picture, step, url, weather } from "./common.mjs";

const providers = {
  "ai-sdk-openai": () => createOpenAI({ baseURL: url, apiKey: "none" }),
  "ai-sdk-anthropic": () => createAnthropic({ baseURL: url, apiKey: "none" }),
  "ai-sdk-openai-compatible": () =>
    createOpenAICompatible({ name: "vlm", baseURL: url, supportsStructuredOutputs: true }),
};
const model = providers[client]()(name);
const tools = {
  weather: tool({
    description: "The weather of a city",
    inputSchema: z.object({ city: z.string() }),
    execute: weather,
  }),
};
const stopWhen = stepCountIs(4);
const common = { model, maxRetries: 0 };

await step("a picture", async () => {
  const content = [
    { type: "image", image: picture, mediaType: "image/png" },
    { type: "text", text: "What do you see?" },
  ];
  const { text } = await generateText({ ...common, messages: [{ role: "user", content }] });
  holds(text, "heart");
});
await step("a PDF document", async () => {
  const content = [
    { type: "file", data: pdf, mediaType: "application/pdf", filename: "sheet.pdf" },
    { type: "text", text: "Say hello." },
  ];
  const { text } = await generateText({ ...common, messages: [{ role: "user", content }] });
  holds(text, "hello to you");
});
await step("a stream", async () => {
  let text = "";
  for await (const piece of streamText({ ...common, prompt: "Say hello." }).textStream) text += piece;
  holds(text, "hello to you");
});
const messages = [];
const cities = { Paris: "rain", Rome: "sun", Oslo: "rain" };
for (const [city, state] of Object.entries(cities))
  await step(`a turn with a tool, ${city}`, async () => {
    messages.push({ role: "user", content: `Call weather for ${city}` });
    const made = await generateText({ ...common, messages, tools, stopWhen });
    messages.push(...made.response.messages);
    holds(made.text, `There is ${state} in ${city}.`);
  });
await step("a streamed turn with a tool", async () => {
  messages.push({ role: "user", content: "Call weather for Rome" });
  const made = streamText({ ...common, messages, tools, stopWhen });
  let text = "";
  for await (const piece of made.textStream) text += piece;
  holds(text, "There is sun in Rome.");
});
if (client !== "ai-sdk-anthropic")
  await step("an object by its schema", async () => {
    const schema = z.object({ city: z.string(), rain: z.boolean() });
    const output = Output.object({ schema });
    const made = await generateText({ ...common, prompt: "JSON for Paris", output });
    holds(JSON.stringify(made.output ?? made.experimental_output), '"city":"Paris"');
  });
