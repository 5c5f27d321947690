// What clients for JavaScript make of a server, as JSON by client. In a folder with the packages of
// tests/e2e/npm: `node --input-type=module - http://127.0.0.1:8080/v1 KEY <clients.mjs`.
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, streamObject, streamText } from "ai";
import OpenAI from "openai";
import { z } from "zod";

const [baseURL, apiKey] = process.argv.slice(2);
const [text, chat, formed, question] = ["시/봄", "채팅", "정형", "안녕?"];

async function joined(stream, piece) {
  let found = "";
  for await (const chunk of await stream) found += piece(chunk) ?? "";
  return found;
}

async function openai() {
  const client = new OpenAI({ baseURL, apiKey, maxRetries: 0, timeout: 60000 });
  const greedy = { temperature: 0, max_tokens: 9 };
  const continued = { model: text, prompt: "나는 오늘", ...greedy };
  const chatted = { model: chat, messages: [{ role: "user", content: question }], ...greedy };
  const asked = { model: chat, input: question, temperature: 0, max_output_tokens: 9 };
  const schema = {
    type: "object",
    properties: { 감정: { enum: ["긍정", "부정"] }, certain: { type: "boolean" } },
    required: ["감정", "certain"],
    additionalProperties: false,
  };
  const named = { name: "review", schema, strict: true };
  const form = { ...chatted, model: formed, max_tokens: 100 };
  const tool = { name: "review", parameters: schema, strict: true };
  const completion = await client.completions.create(continued);
  const answer = await client.chat.completions.create(chatted);
  const parsed = await client.chat.completions.parse({
    ...form, response_format: { type: "json_schema", json_schema: named },
  });
  const parsedResponse = await client.responses.parse({
    model: formed, input: question, text: { format: { type: "json_schema", ...named } },
  });
  const called = await client.chat.completions.parse({
    ...form, tools: [{ type: "function", function: tool }], tool_choice: "required",
  });
  const refused = await client.chat.completions.create({ ...chatted, model: "없음" }).catch((e) => e);
  return {
    completion: completion.choices[0].text,
    "streamed completion": await joined(
      client.completions.create({ ...continued, stream: true }), (chunk) => chunk.choices[0].text),
    chat: answer.choices[0].message.content,
    "streamed chat": await joined(
      client.chat.completions.create({ ...chatted, stream: true }),
      (chunk) => chunk.choices[0].delta.content),
    tokens: [answer.usage.prompt_tokens, answer.usage.completion_tokens],
    response: (await client.responses.create(asked)).output_text,
    "streamed response": await joined(
      client.responses.create({ ...asked, stream: true }),
      (event) => (event.type === "response.output_text.delta" ? event.delta : "")),
    forms: [
      JSON.parse(parsed.choices[0].message.content),
      JSON.parse(parsedResponse.output_text),
      called.choices[0].message.tool_calls[0].function.parsed_arguments,
    ],
    "no such model": [refused.constructor.name, refused.status, refused.message],
  };
}

// Vercel's AI SDK, with both of its providers; `official` asks /v1/responses unless told otherwise.
async function ai() {
  const options = { name: "kogpt2", supportsStructuredOutputs: true, includeUsage: true };
  const compatible = createOpenAICompatible({ baseURL, apiKey, ...options });
  const official = createOpenAI({ baseURL, apiKey });
  const asked = { prompt: question, temperature: 0, maxOutputTokens: 9, maxRetries: 0 };
  const answer = await generateText({ model: compatible(chat), ...asked });
  const streamed = streamText({ model: compatible(chat), ...asked });
  const schema = z.object({ 감정: z.enum(["긍정", "부정"]), certain: z.boolean() });
  const form = { schema, prompt: question, maxOutputTokens: 100, maxRetries: 0 };
  const forms = [];
  for (const model of [compatible(formed), official.chat(formed), official(formed)]) {
    forms.push((await generateObject({ model, ...form })).object);
    const parts = streamObject({ model, ...form });
    forms.push(JSON.parse(await joined(parts.textStream, (piece) => piece)), await parts.object);
  }
  const refused = await generateText({ ...asked, model: compatible("없음") }).catch((e) => e);
  return {
    chat: answer.text,
    "streamed chat": await joined(streamed.textStream, (piece) => piece),
    tokens: [answer.usage.inputTokens, answer.usage.outputTokens],
    "streamed tokens": [(await streamed.usage).inputTokens, (await streamed.usage).outputTokens],
    response: (await generateText({ model: official(chat), ...asked })).text,
    "streamed response": await joined(
      streamText({ model: official(chat), ...asked }).textStream, (piece) => piece),
    forms,
    "no such model": [refused.name, refused.statusCode, refused.message],
  };
}

const found = {};
for (const client of [openai, ai]) found[client.name] = await client().catch((error) => error.stack);
console.log(JSON.stringify(found));
