// Libraries of node: a picture, a stream, tools that the library itself runs.
import { client, dataUrl, holds, model, picture, root, step, url, weather } from "./common.mjs";
import { z } from "zod";

const seen = [
  { type: "image_url", image_url: { url: dataUrl } },
  { type: "text", text: "What do you see?" },
];
const parameters = {
  type: "object",
  properties: { city: { type: "string" } },
  required: ["city"],
};

const tries = {
  async "openai-node"() {
    const { default: OpenAI } = await import("openai");
    const api = new OpenAI({ baseURL: url, apiKey: "none", maxRetries: 0 });
    await step("a picture", async () => {
      const messages = [{ role: "user", content: seen }];
      const made = await api.chat.completions.create({ model, messages });
      holds(made.choices[0].message.content, "heart");
    });
    await step("runs tools", async () => {
      const made = api.chat.completions.runTools({
        model,
        messages: [{ role: "user", content: "Call weather for Paris" }],
        tools: [{ type: "function", function: { name: "weather", description: "Weather", parameters, parse: JSON.parse, function: weather } }],
      });
      holds(await made.finalContent(), "There is rain in Paris.");
    });
    await step("a streamed response", async () => {
      let text = "";
      for await (const event of await api.responses.create({ model, input: "Say hello.", stream: true }))
        if (event.type === "response.output_text.delta") text += event.delta;
      holds(text, "hello to you");
    });
  },
  async "anthropic-node"() {
    const { default: Anthropic } = await import("@anthropic-ai/sdk");
    const api = new Anthropic({ baseURL: root, apiKey: "none", maxRetries: 0 });
    const image = { type: "base64", media_type: "image/png", data: picture.toString("base64") };
    await step("a picture", async () => {
      const content = [{ type: "image", source: image }, { type: "text", text: "What do you see?" }];
      const made = await api.messages.create({ model, max_tokens: 64, messages: [{ role: "user", content }] });
      holds(made.content[0].text, "heart");
    });
    await step("a stream with a tool", async () => {
      const tools = [{ name: "weather", description: "Weather", input_schema: parameters }];
      const messages = [{ role: "user", content: "Call weather for Paris" }];
      const made = await api.messages.stream({ model, max_tokens: 200, messages, tools }).finalMessage();
      const call = made.content.find((block) => block.type === "tool_use");
      messages.push({ role: "assistant", content: made.content });
      messages.push({ role: "user", content: [{ type: "tool_result", tool_use_id: call.id, content: await weather(call.input) }] });
      const last = await api.messages.create({ model, max_tokens: 200, messages, tools });
      holds(last.content[0].text, "There is rain in Paris.");
    });
  },
  async "openai-agents-node"() {
    const { Agent, OpenAIProvider, Runner, setTracingDisabled, tool } = await import("@openai/agents");
    setTracingDisabled(true);
    const get = tool({ name: "weather", description: "Weather", parameters: z.object({ city: z.string() }), execute: weather });
    for (const useResponses of [true, false])
      await step(`tools over ${useResponses ? "responses" : "chat"}`, async () => {
        const runner = new Runner({ modelProvider: new OpenAIProvider({ baseURL: url, apiKey: "none", useResponses }) });
        const agent = new Agent({ name: "a", instructions: "Be brief.", model, tools: [get] });
        const first = await runner.run(agent, "Call weather for Paris");
        holds(first.finalOutput, "There is rain in Paris.");
        const next = await runner.run(agent, [...first.history, { role: "user", content: "Call weather for Rome" }]);
        holds(next.finalOutput, "There is sun in Rome.");
      });
  },
  async "langchain-node"() {
    const { ChatOpenAI } = await import("@langchain/openai");
    const chat = new ChatOpenAI({ model, apiKey: "none", maxRetries: 0, configuration: { baseURL: url } });
    await step("a picture", async () => holds((await chat.invoke([{ role: "user", content: seen }])).content, "heart"));
    await step("a tool call", async () => {
      const tools = [{ type: "function", function: { name: "weather", description: "Weather", parameters } }];
      const made = await chat.bindTools(tools).invoke("Call weather for Paris");
      holds(JSON.stringify(made.tool_calls[0].args), "Paris");
    });
    await step("a structured answer", async () => {
      const form = chat.withStructuredOutput(z.object({ city: z.string(), rain: z.boolean() }));
      holds((await form.invoke("JSON for Paris")).city, "Paris");
    });
  },
};
await tries[client]();
