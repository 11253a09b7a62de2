// Vercel's `ai`, with `@ai-sdk/openai-compatible`.

import assert from "node:assert/strict";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { embedMany, generateObject, generateText, jsonSchema, streamText, tool } from "ai";
import { run } from "./calls.mjs";

const prompt = "What is a ring?";
const provider = createOpenAICompatible({
  name: "meshllm",
  baseURL: process.env.OPENAI_BASE_URL,
  apiKey: process.env.OPENAI_API_KEY,
  includeUsage: true,
  supportsStructuredOutputs: true,
});
const asked = { model: provider("builtin"), prompt, temperature: 0, maxRetries: 0 };

async function text() {
  const reply = await generateText(asked);
  assert.match(reply.text, /^A ring is/);
  assert.equal(reply.finishReason, "stop");
  assert.ok(reply.usage.outputTokens > 0);
}

async function stream() {
  const reply = streamText(asked);
  let told = "";
  for await (const each of reply.textStream) told += each;
  assert.equal(told, (await generateText(asked)).text);
  assert.ok((await reply.usage).outputTokens > 0);
}

async function object() {
  const legs = { type: "integer", minimum: 0, maximum: 8 };
  const schema = jsonSchema({
    type: "object", properties: { legs }, required: ["legs"], additionalProperties: false,
  });
  const reply = await generateObject({ ...asked, schema });
  assert.ok(reply.object.legs <= 8);
}

async function tools() {
  const city = { type: "string", maxLength: 20 };
  const inputSchema = jsonSchema({
    type: "object", properties: { city }, required: ["city"], additionalProperties: false,
  });
  const weather = tool({ description: "The weather of a city.", inputSchema });
  const reply = await generateText({
    ...asked, temperature: 1, seed: 1, tools: { weather }, toolChoice: "required",
  });
  assert.equal(reply.toolCalls[0].toolName, "weather");
}

async function toolStream() {
  const city = { type: "string", maxLength: 20 };
  const inputSchema = jsonSchema({
    type: "object", properties: { city }, required: ["city"], additionalProperties: false,
  });
  const weather = tool({ inputSchema, execute: async () => "sunny" });
  const reply = streamText({ ...asked, seed: 1, tools: { weather }, toolChoice: "required" });
  const kinds = new Set();
  for await (const part of reply.fullStream) kinds.add(part.type);
  assert.ok(kinds.has("tool-call") && kinds.has("tool-result"));
}

async function embeddings() {
  const model = provider.embeddingModel("builtin");
  const reply = await embedMany({ model, values: [prompt, "What is a node?"] });
  assert.equal(reply.embeddings.length, 2);
}

async function errors() {
  const asking = generateText({ ...asked, model: provider("gpt-5") });
  await assert.rejects(asking, { statusCode: 404 });
}

await run(text, stream, object, tools, toolStream, embeddings, errors);
