// The page's words.

/** Each text in English and in Korean. */
const TEXTS = {
  skip: ["Skip to the prompt", "프롬프트로 건너뛰기"],
  console: ["console", "콘솔"],
  connecting: ["connecting", "연결 중"],
  live: ["live", "실시간"],
  lost: ["connection lost, trying again", "연결이 끊겨 다시 시도합니다"],
  locked: ["no token", "토큰이 없습니다"],
  token: ["Token", "토큰"],
  theme_auto: ["Theme: system", "테마: 시스템"],
  theme_light: ["Theme: light", "테마: 밝게"],
  theme_dark: ["Theme: dark", "테마: 어둡게"],

  ask: ["Ask", "물어보기"],
  prompt: ["Prompt", "프롬프트"],
  first_prompt: ["나 보기가 역겨워", "나 보기가 역겨워"],
  parameters: ["Parameters", "매개변수"],
  unset: ["empty: the model's own", "비우면 모델의 기본값"],
  form: ["choices, one a line; or a regex, schema or grammar", "한 줄에 하나씩 선택지, 또는 정규식, 스키마, 문법"],
  run: ["Run", "실행"],
  stop: ["Stop", "중지"],
  chat: ["as a chat", "채팅으로"],
  keys: ["Ctrl+Enter runs, Esc stops, / goes to the filter", "Ctrl+Enter 실행, Esc 중지, / 이름 찾기"],
  choose: ["Choose up to four models below: they answer side by side.", "아래에서 모델을 네 개까지 고르면 나란히 답합니다."],
  remove: ["Remove {name}", "{name} 빼기"],
  legend: ["probability of each token", "토큰별 확률"],
  pick: [
    "A token shows its likeliest alternatives: click, or ← → in the answer.",
    "토큰을 누르거나 답에서 ← →로 옮기면 다른 후보를 보여 줍니다.",
  ],
  waiting: ["waiting", "기다리는 중"],
  loading_first: ["being loaded", "로드하는 중"],
  stopped: ["stopped", "중지함"],
  answered: ["{name} answered: {text}", "{name}의 답: {text}"],
  first_token: ["first token", "첫 토큰"],
  with_load: ["with its load", "로드 시간 포함"],
  tokens: ["tokens", "토큰"],
  tokens_s: ["tokens/s", "토큰/초"],
  finish_stop: ["ended by itself", "모델이 끝맺음"],
  labeled: ["classified", "분류함"],
  no_entities: ["no entities", "개체명이 없습니다"],
  "text-classification": ["classifies texts", "텍스트 분류"],
  "token-classification": ["finds entities", "토큰 분류"],
  finish_length: ["length", "길이 제한"],
  broken: ["the connection broke off", "연결이 끊겼습니다"],
  sequence: ["answer {number}", "답 {number}"],
  copy_as: ["Copy as …", "코드 복사 …"],
  copy: ["Copy", "복사"],
  copied: ["Copied", "복사했습니다"],
  close: ["Close", "닫기"],
  alternative: ["{text} {share}", "{text} {share}"],
  not_sent: ["not sent: {field} {why}", "보내지 않았습니다: {field} {why}"],
  not_number: ["is not a number", "값이 숫자가 아닙니다"],
  not_json: ["is not a JSON object", "값이 JSON 객체가 아닙니다"],
  no_models: ["No model is chosen.", "고른 모델이 없습니다."],

  models: ["Models", "모델"],
  filter: ["Filter by name", "이름으로 찾기"],
  compare: ["Ask", "선택"],
  name: ["Name", "이름"],
  state: ["State", "상태"],
  size: ["Size", "크기"],
  memory: ["Memory", "메모리"],
  requests: ["Requests", "요청"],
  first_token_s: ["First token", "첫 토큰"],
  last_used: ["Last used", "마지막 사용"],
  actions: ["Actions", "작업"],
  load: ["Load", "로드"],
  unload: ["Unload", "언로드"],
  pin: ["Pin", "고정"],
  pin_tip: ["never unloaded to make room for others", "축출하지 않습니다"],
  errors: ["{count} failed", "실패 {count}"],
  in_flight: ["{count} now", "처리 중 {count}"],
  adapter_of: ["adapter of {base}", "{base}의 어댑터"],
  delta_of: ["delta of {base}", "{base}의 델타"],
  whole_because: ["no delta: {reason}", "델타 아님: {reason}"],
  alias_is: ["alias {names}", "별칭 {names}"],
  counted: ["{loaded} of {all} loaded", "{all}개 중 {loaded}개 로드됨"],
  empty: ["The store is empty.", "저장소가 비어 있습니다."],
  listing: ["Reading the store …", "저장소를 읽는 중 …"],
  no_match: ["No model has this in its name.", "그런 이름의 모델이 없습니다."],
  stored: ["not loaded", "로드 안 됨"],
  fetching: ["fetching", "내려받는 중"],
  loading: ["loading", "로드하는 중"],
  ready: ["ready", "준비됨"],
  draining: ["unloading", "언로드하는 중"],
  failed: ["failed", "실패"],
  hot: ["hot", "hot"],
  parked: ["parked", "parked"],

  engine: ["Engine", "엔진"],
  down: ["The engine does not answer.", "엔진이 응답하지 않습니다."],
  weights: ["weights", "가중치"],
  kv: ["K/V cache", "K/V 캐시"],
  kept: ["prefix cache", "프리픽스 캐시"],
  free: ["free", "여유"],
  budget: [
    "Memory budget {total}: weights {weights}, K/V cache {kv}, prefix cache {kept}, free {free}",
    "메모리 예산 {total}: 가중치 {weights}, K/V 캐시 {kv}, 프리픽스 캐시 {kept}, 여유 {free}",
  ],
  rows: ["rows in the batch", "배치 안의 시퀀스"],
  queue: ["in the queue", "대기 중인 요청"],
  now: ["tokens/s now", "지금 토큰/초"],
  pace: ["Tokens/s in the last minute", "최근 1분의 토큰/초"],
  pace_of: ["Tokens/s in the last minute: {now} now, {most} at most", "최근 1분의 토큰/초: 지금 {now}, 최고 {most}"],
  journal: ["Recent events", "최근 기록"],
  quiet: ["Nothing yet.", "아직 없습니다."],
  was_loaded: ["{model} loaded in {seconds}", "{model} 로드됨, {seconds} 걸림"],
  was_unloaded: ["{model} unloaded in {seconds}", "{model} 언로드됨, {seconds} 걸림"],
  was_evicted: ["{model} evicted, idle for {seconds}", "{model} 축출됨, {seconds} 동안 요청 없음"],
  was_failed: ["{model} did not load: {reason}", "{model} 로드 실패: {reason}"],

  token_title: ["The server's tokens", "서버 토큰"],
  token_why: [
    "Needed only if the server requires one. They stay in this page's memory until it is closed.",
    "서버가 요구할 때만 필요합니다. 이 페이지의 메모리에만 보관하고, 페이지를 닫으면 사라집니다.",
  ],
  token_wrong: ["This token was not accepted.", "토큰이 맞지 않습니다."],
  token_call: ["To call models (INFERENCE_TOKEN)", "모델 호출용 (INFERENCE_TOKEN)"],
  token_manage: ["To load and unload (MANAGEMENT_TOKEN)", "로드와 언로드용 (MANAGEMENT_TOKEN)"],
  token_use: ["Use", "사용"],
};
const LANGUAGES = ["en", "ko"];

let language = localStorage.getItem("language") ?? (navigator.language.startsWith("ko") ? "ko" : "en");
const listeners = [];

/** The text of `key`, with `values` in the place of `{names}`. */
export function t(key, values = {}) {
  return TEXTS[key][LANGUAGES.indexOf(language)].replace(/\{(\w+)\}/g, (_, name) => values[name]);
}

/** Calls `write` now and whenever the language changes. */
export function inLanguage(write) {
  listeners.push(write);
  write();
}

export function switchLanguage() {
  language = language === "ko" ? "en" : "ko";
  localStorage.setItem("language", language);
  for (const write of listeners) write();
}

export const currentLanguage = () => language;
