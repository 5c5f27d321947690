// A call as code: curl, OpenAI's Python client, boto3.

import { tokens } from "./api.js";
import { call, openaiParameters } from "./calls.js";

const TOKEN = "INFERENCE_TOKEN"; // code names the variable; the token itself stays in the page

/** Code by the name of its language, for the call `query` as `Answer` has it. */
export function snippets(query) {
  const found = { curl: curl(query) };
  if (!query.task) found["openai (Python)"] = openai(query);
  if (query.task || !query.chat) found["boto3 (Python)"] = boto3(query);
  return found;
}

// Parameters that OpenAI's Python client takes as arguments; others go into `extra_body`.
const OPENAI = [
  "echo", "frequency_penalty", "logit_bias", "logprobs", "max_tokens", "n", "presence_penalty", "seed", "stop",
  "temperature", "top_logprobs", "top_p",
];

const quoted = (text) => `'${text.replaceAll("'", `'\\''`)}'`;

function curl(query) {
  const { path, body } = call(query);
  const lines = [
    `curl -N ${quoted(location.origin + path)}`,
    "-H 'Content-Type: application/json'",
    ...(tokens.call ? [`-H "Authorization: Bearer $${TOKEN}"`] : []),
    `-d ${quoted(JSON.stringify(body))}`,
  ];
  return `${lines.join(" \\\n  ")}\n`;
}

/** A value as Python writes it. */
function python(value) {
  if (Array.isArray(value)) return `[${value.map(python).join(", ")}]`;
  if (value && typeof value === "object")
    return `{${Object.entries(value).map(([key, v]) => `${JSON.stringify(key)}: ${python(v)}`).join(", ")}}`;
  if (typeof value === "boolean") return value ? "True" : "False";
  return JSON.stringify(value);
}

const lines = (values) => Object.entries(values).map(([name, value]) => `    ${name}=${python(value)},\n`).join("");

function openai({ model, prompt, parameters, chat }) {
  const all = Object.entries(openaiParameters(parameters, chat));
  const [known, more] = [true, false].map((is) => Object.fromEntries(all.filter(([name]) => OPENAI.includes(name) === is)));
  const stream = !known.n;
  const given = {
    model,
    ...(chat ? { messages: [{ role: "user", content: prompt }] } : { prompt }),
    ...known,
    ...(Object.keys(more).length && { extra_body: more }),
    ...(stream && { stream }),
  };
  const text = (choice) => (chat ? `${choice}.${stream ? "delta" : "message"}.content or ""` : `${choice}.text`);
  const show = stream
    ? `for chunk in answer:\n    print(${text("chunk.choices[0]")}, end="", flush=True)\n`
    : `for choice in answer.choices:\n    print(${text("choice")})\n`;
  return `${tokens.call ? "import os\n\n" : ""}from openai import OpenAI

client = OpenAI(
    base_url=${python(`${location.origin}/v1`)},
    api_key=${tokens.call ? `os.environ["${TOKEN}"]` : '"x"'},
)
answer = client.${chat ? "chat." : ""}completions.create(
${lines(given)})
${show}`;
}

function boto3(query) {
  const { model } = query;
  const { inputs, parameters } = call({ ...query, chat: false }).body;
  const token = tokens.call
    ? `\n\ndef with_token(request, **_):
    request.headers["Authorization"] = "Bearer " + os.environ["${TOKEN}"]


client.meta.events.register("before-send.sagemaker-runtime", with_token)`
    : "";
  return `import json
${tokens.call ? "import os\n" : ""}
import boto3

client = boto3.client(
    "sagemaker-runtime",
    endpoint_url=${python(location.origin)},
    region_name="us-east-1",
    aws_access_key_id="x",
    aws_secret_access_key="x",
)${token}
answer = client.invoke_endpoint(
    EndpointName="any",
    TargetModel=${python(`${model}.tar.gz`)},
    ContentType="application/json",
    Body=json.dumps(${python({ inputs, parameters })}),
)
print(json.loads(answer["Body"].read()))
`;
}
