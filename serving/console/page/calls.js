// Calls of the server, and their streams in one form.

import { modelPath, Refused } from "./api.js";

// The parameters of a classifier, by its task: a text's likeliest labels, or its entities.
const LABELS = { "text-classification": { top_k: 8 }, "token-classification": { aggregation_strategy: "simple" } };

/** Path and body for `{model, prompt, parameters, chat, stream, task}`: `/predictions`, whose empty
 *  parameters are the model's own, or a chat by the model's own template. */
export function call({ model, prompt, parameters, chat, stream, task }) {
  if (task) return { path: `/predictions/${modelPath(model)}`, body: { inputs: prompt, parameters: LABELS[task] } };
  if (chat) {
    const messages = [{ role: "user", content: prompt }];
    const body = { model, messages, ...openaiParameters(parameters, true), stream };
    return { path: "/v1/chat/completions", body };
  }
  return { path: `/predictions/${modelPath(model)}`, body: { inputs: prompt, parameters, ...(stream && { stream }) } };
}

/** Parameters of `/predictions` by OpenAI's names. Greedy is the default there and not here. */
export function openaiParameters(parameters, chat) {
  const {
    max_new_tokens, num_return_sequences, do_sample, logprobs, return_full_text,
    decoder_input_details, ...same
  } = parameters;
  const found = { max_tokens: max_new_tokens ?? 64, ...same };
  const draws = ["temperature", "top_k", "top_p", "seed"].some((name) => name in same);
  if (!(do_sample ?? draws)) found.temperature = 0;
  if (num_return_sequences > 1) found.n = num_return_sequences;
  if (logprobs != null && chat) Object.assign(found, { logprobs: true, top_logprobs: logprobs });
  else if (logprobs != null) found.logprobs = logprobs;
  if (return_full_text && !chat) found.echo = true;
  return found;
}

/** The tokens of an event of either API's stream: `{index, text, isToken, step?, prefill?, end?}`.
 *  The text of one that is a part of a character is empty. `step` and each of `prefill` have
 *  `logprob` and `top`. */
export function* tokensOf(event) {
  if (event.error) throw new Refused(event.error.code, event.error.message);
  if (!event.choices) {
    if (event.token === undefined) yield { ...event, text: "", end: event.finish_reason };
    else yield { ...event, isToken: true, step: event.logprobs };
    return;
  }
  for (const { index, delta, logprobs, finish_reason: end } of event.choices) {
    const scored = logprobs?.content?.[0];
    const top = scored?.top_logprobs.map(({ token, logprob }) => ({ text: token, logprob }));
    const text = delta.content ?? "";
    yield { index, text, isToken: Boolean(text || scored), step: scored && { logprob: scored.logprob, top }, end };
  }
}
