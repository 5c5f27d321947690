"""The gateway's and the workers' headers, beside Multi Model Server's own protocol."""

from __future__ import annotations

# Carries the secret that asks a worker how its load went.
PROBE_HEADER = "x-kogpt2-probe"
# How many seconds the answer may take.
TIMEOUT_HEADER = "x-kogpt2-timeout"
# What the engine can be told to cancel the request by, when its client goes away.
REQUEST_HEADER = "x-kogpt2-request"
# On every answer of a worker; one without it is MMS's own.
WORKER_HEADER = "x-kogpt2-worker"
# On an answer that the engine made: the tokens of the prompt and those made, as "12 34".
TOKENS_HEADER = "x-kogpt2-tokens"
# Of a request for an alias: the model that answers, percent-encoded.
SERVED_MODEL = "x-served-model"
REQUEST_ID = "x-request-id"  # the client's own, or the gateway's, for the log

# MMS ends a worker that answers more, with its headers.
MAX_RESPONSE_BYTES = 104_857_600
