// The server: requests with the right token, and server-sent events.

import { askToken } from "./dialogs.js";

/** The tokens, here and nowhere else. `call` is for calling models, `manage` for loading them. */
export const tokens = { call: "", manage: "" };

export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** A response with a good status. Asks for a token where the server does; `kind` says which.
 *  Throws `Refused` with the server's own words. */
export async function request(kind, path, options = {}) {
  for (;;) {
    const token = tokens[kind] || (kind === "look" && (tokens.call || tokens.manage));
    const headers = { ...options.headers };
    if (token) headers.Authorization = `Bearer ${utf8(token)}`;
    const response = await fetch(path, { cache: "no-store", ...options, headers });
    if (response.ok) return response;
    if (response.status === 401 && (await askToken(tokens, kind, Boolean(token)))) continue;
    throw new Refused(response.status, reason(await response.text(), response.status));
  }
}

/** A text as the one-byte characters that a header is made of. */
const utf8 = (text) => String.fromCharCode(...new TextEncoder().encode(text));

/** What the body says is wrong, in the shape of any of the server's contracts. */
function reason(text, status) {
  try {
    const body = JSON.parse(text);
    return body.message ?? body.error.message ?? body.error;
  } catch {
    return text || `HTTP ${status}`;
  }
}

/** The objects of a stream of server-sent events, until it ends or says [DONE]. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      if (part === "data: [DONE]") return;
      if (part.startsWith("data: ")) yield JSON.parse(part.slice(6));
    }
  }
}

const RETRIES_MS = [300, 1000, 3000];

/** Calls `tell` with each message of the feed, for ever, and `state` with live, lost, or locked
 *  where a token is missing. */
export async function follow(tell, state) {
  for (let failures = 0; ; failures++) {
    try {
      for await (const message of events(await request("look", "/console/events"))) {
        if (message.whole) state("live");
        failures = 0;
        tell(message);
      }
      state("lost");
    } catch (error) {
      if (error.status === 401) {
        state("locked");
        await new Promise((given) => document.addEventListener("token", given, { once: true }));
        continue;
      }
      if (!(error instanceof TypeError || error instanceof Refused)) throw error;
      state("lost");
    }
    await new Promise((done) => setTimeout(done, RETRIES_MS[Math.min(failures, 2)]));
  }
}

export const modelPath = (name) => name.split("/").map(encodeURIComponent).join("/");

export const load = (name) =>
  request("manage", `/v2/repository/models/${modelPath(name)}/load`, { method: "POST" });

export const unload = (name) => request("manage", `/models/${modelPath(name)}`, { method: "DELETE" });

export const pin = (name, pinned) =>
  request("manage", `/models/${modelPath(name)}?pinned=${pinned}`, { method: "PUT" });
