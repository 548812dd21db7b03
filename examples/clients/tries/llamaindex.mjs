// LlamaIndex's TypeScript provider of OpenAI: a picture, a stream, a tool call.
import { OpenAI } from "@llamaindex/openai";
import { dataUrl, holds, model, step, url } from "./common.mjs";

const llm = new OpenAI({ model, apiKey: "none", baseURL: url, maxRetries: 0 });
const parameters = {
  type: "object",
  properties: { city: { type: "string" } },
  required: ["city"],
};
const tool = {
  metadata: { name: "weather", description: "The weather", parameters },
  call: () => "rain",
};

await step("a picture", async () => {
  const content = [
    { type: "image_url", image_url: { url: dataUrl } },
    { type: "text", text: "What do you see?" },
  ];
  holds((await llm.chat({ messages: [{ role: "user", content }] })).message.content, "heart");
});
await step("a stream", async () => {
  let text = "";
  const messages = [{ role: "user", content: "Say hello." }];
  for await (const piece of await llm.chat({ messages, stream: true })) text += piece.delta;
  holds(text, "hello to you");
});
await step("a tool call", async () => {
  const messages = [{ role: "user", content: "Call weather for Paris" }];
  const made = await llm.chat({ messages, tools: [tool] });
  holds(JSON.stringify(made.message.options.toolCall[0].input), "Paris");
});
