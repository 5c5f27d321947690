"""OpenAI's API over the models of the engine.

`/v1/models`, `/v1/completions`, `/v1/chat/completions`, `/v1/responses`.

https://platform.openai.com/docs/api-reference
"""
