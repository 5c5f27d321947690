"""Headers and limits of requests from the gateway to workers through Multi Model Server."""

from __future__ import annotations

# The secret with which the gateway probes a worker for the outcome of its load.
PROBE_HEADER = "x-kogpt2-probe"
# The timeout of a request in seconds.
TIMEOUT_HEADER = "x-kogpt2-timeout"
# The id by which the engine cancels a request when its client disconnects.
REQUEST_HEADER = "x-kogpt2-request"
# On every response of a worker; without it, a response is MMS's own.
WORKER_HEADER = "x-kogpt2-worker"
# On a response of the engine: the tokens of the prompt and of the answer, as "12 34".
TOKENS_HEADER = "x-kogpt2-tokens"
# On a response to a request for an alias: the name of the model that answered, percent-encoded.
SERVED_MODEL = "x-served-model"
REQUEST_ID = "x-request-id"  # the client's own, or the gateway's, for the log
TRACEPARENT = "traceparent"  # https://www.w3.org/TR/trace-context/, of the client or the gateway

# Including the headers. MMS kills a worker that sends a longer response.
MAX_RESPONSE_BYTES = 104_857_600
