// What OpenAI's client for JavaScript makes of a server, as JSON:
// `node openai_client.mjs FOLDER http://127.0.0.1:8080/v1 KEY`, openai being in FOLDER/node_modules.
import { pathToFileURL } from "node:url";

const [folder, baseURL, apiKey] = process.argv.slice(2);
const { default: OpenAI } = await import(pathToFileURL(`${folder}/node_modules/openai/index.mjs`));
const client = new OpenAI({ baseURL, apiKey, maxRetries: 0, timeout: 60000 });
const greedy = { temperature: 0, max_tokens: 9 };
const text = { model: "시/봄", prompt: "나는 오늘", ...greedy };
const chat = { model: "채팅", messages: [{ role: "user", content: "안녕?" }], ...greedy };

async function joined(stream, piece) {
  let found = "";
  for await (const chunk of await stream) found += piece(chunk.choices[0]) ?? "";
  return found;
}

const completion = await client.completions.create(text);
const answer = await client.chat.completions.create(chat);
const asked = { model: chat.model, input: "안녕?", temperature: 0, max_output_tokens: 9 };
const response = await client.responses.create(asked);
let deltas = "";
for await (const event of await client.responses.create({ ...asked, stream: true })) {
  if (event.type === "response.output_text.delta") deltas += event.delta;
}
const schema = {
  type: "object",
  properties: { 감정: { enum: ["긍정", "부정"] }, certain: { type: "boolean" } },
  required: ["감정", "certain"],
  additionalProperties: false,
};
const named = { name: "review", schema, strict: true };
const formed = { ...chat, model: "정형", max_tokens: 100 };
const parsed = await client.chat.completions.parse({
  ...formed, response_format: { type: "json_schema", json_schema: named },
});
const parsedResponse = await client.responses.parse({
  model: formed.model, input: "안녕?", text: { format: { type: "json_schema", ...named } },
});
const tools = [{ type: "function", function: { name: "review", parameters: schema, strict: true } }];
const called = await client.chat.completions.parse({ ...formed, tools, tool_choice: "required" });
const refused = await client.chat.completions.create({ ...chat, model: "없음" }).catch((e) => e);
console.log(
  JSON.stringify({
    completion: completion.choices[0].text,
    "streamed completion": await joined(
      client.completions.create({ ...text, stream: true }), (choice) => choice.text),
    chat: answer.choices[0].message.content,
    "streamed chat": await joined(
      client.chat.completions.create({ ...chat, stream: true }), (choice) => choice.delta.content),
    tokens: [answer.usage.prompt_tokens, answer.usage.completion_tokens],
    response: response.output_text,
    "streamed response": deltas,
    forms: [
      JSON.parse(parsed.choices[0].message.content),
      JSON.parse(parsedResponse.output_text),
      called.choices[0].message.tool_calls[0].function.parsed_arguments,
    ],
    "no such model": [refused.constructor.name, refused.status, refused.message],
  }),
);
