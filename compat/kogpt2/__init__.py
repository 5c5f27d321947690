"""Replaces the `kogpt2` package that scripts of KoGPT2 v1's fine-tunes import.

Provides `kogpt2.model.gpt.GPT2Model`, `kogpt2.utils.get_tokenizer`,
`kogpt2.mxnet_kogpt2.get_mxnet_kogpt2_model`. Reads files from the model's own folder; downloads
none.
"""
