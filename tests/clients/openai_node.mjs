// OpenAI's own library for JavaScript.

import assert from "node:assert/strict";
import OpenAI from "openai";
import { run } from "./calls.mjs";

const model = "builtin";
const content = "What is a ring?";
const messages = [{ role: "user", content }];
const client = new OpenAI({ maxRetries: 0 });
const ask = (more) => client.chat.completions.create({ model, messages, temperature: 0, ...more });

async function models() {
  const found = [];
  for await (const each of client.models.list()) found.push(each.id);
  assert.deepEqual(found, [model]);
}

async function chat() {
  const reply = await ask({});
  assert.match(reply.choices[0].message.content, /^A ring is/);
  assert.equal(reply.choices[0].finish_reason, "stop");
}

async function stream() {
  let text = "";
  let usage = null;
  for await (const chunk of await ask({ stream: true, stream_options: { include_usage: true } })) {
    text += chunk.choices[0]?.delta.content ?? "";
    usage = chunk.usage ?? usage;
  }
  assert.equal(text, (await ask({})).choices[0].message.content);
  assert.ok(usage.completion_tokens > 0);
}

async function streamHelper() {
  const runner = client.chat.completions.stream({ model, messages, temperature: 0 });
  assert.match(await runner.finalContent(), /^A ring is/);
}

async function completion() {
  const reply = await client.completions.create({ model, prompt: "Once upon", max_tokens: 4 });
  assert.ok(reply.choices[0].text);
}

async function responses() {
  const reply = await client.responses.create({ model, input: content, temperature: 0 });
  assert.match(reply.output_text, /^A ring is/);
  const kinds = new Set();
  const events = await client.responses.create({ model, input: content, stream: true });
  for await (const event of events) kinds.add(event.type);
  assert.ok(kinds.has("response.output_text.delta") && kinds.has("response.completed"));
}

async function structured() {
  const legs = { type: "integer", minimum: 0, maximum: 8 };
  const schema = {
    type: "object", properties: { legs }, required: ["legs"], additionalProperties: false,
  };
  const json_schema = { name: "animal", schema, strict: true };
  const reply = await ask({ response_format: { type: "json_schema", json_schema } });
  assert.ok(JSON.parse(reply.choices[0].message.content).legs <= 8);
}

async function tools() {
  const city = { type: "string", maxLength: 20 };
  const parameters = {
    type: "object", properties: { city }, required: ["city"], additionalProperties: false,
  };
  const tool = { type: "function", function: { name: "weather", parameters } };
  const reply = await ask({ tools: [tool], tool_choice: "required", seed: 1, temperature: 1 });
  assert.equal(reply.choices[0].message.tool_calls[0].function.name, "weather");
}

async function embeddings() {
  const reply = await client.embeddings.create({ model, input: [content, "What is a node?"] });
  assert.equal(reply.data.length, 2);
  assert.ok(reply.data[0].embedding.every(Number.isFinite));
}

async function abort() {
  const chunks = await ask({ stream: true, temperature: 1, max_tokens: 500 });
  for await (const _ of chunks) break; // the connection is closed
  assert.match((await ask({})).choices[0].message.content, /^A ring is/);
}

async function errors() {
  await assert.rejects(ask({ model: "gpt-5" }), OpenAI.NotFoundError);
  await assert.rejects(ask({ temperature: "hot" }), OpenAI.BadRequestError);
  const long = [{ role: "user", content: "ring ".repeat(20_000) }];
  await assert.rejects(ask({ messages: long }), { code: "context_length_exceeded" });
}

await run(
  models, chat, stream, streamHelper, completion, responses, structured, tools, embeddings, abort,
  errors,
);
