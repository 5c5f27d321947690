"""Makes adapters that classify, by PEFT, and the logits that they give to texts.

python -m tests.oracle.make_labeled_adapters BASE FOLDER TEXTS.json LOGITS.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
)

# What `LoraConfig` is given, with the number of labels.
ADAPTERS: dict[str, tuple[int, dict[str, Any]]] = {
    "texts": (2, {"task_type": "SEQ_CLS", "target_modules": ["c_attn"]}),
    "many": (7, {"task_type": "SEQ_CLS", "target_modules": ["c_attn", "c_proj", "c_fc"]}),
    "number": (1, {"task_type": "SEQ_CLS", "target_modules": ["c_fc"], "use_rslora": True}),
    "dora": (3, {"task_type": "SEQ_CLS", "target_modules": ["c_attn"], "use_dora": True}),
    "tokens": (5, {"task_type": "TOKEN_CLS", "target_modules": ["c_attn", "c_proj"]}),
}


def main() -> None:
    base, folder, texts, answers = map(Path, sys.argv[1:])
    logits: dict[str, Any] = {}
    tokenizer = AutoTokenizer.from_pretrained(base)
    torch.manual_seed(0)
    for name, (count, options) in ADAPTERS.items():
        of_tokens = options["task_type"] == "TOKEN_CLS"
        kind = AutoModelForTokenClassification if of_tokens else AutoModelForSequenceClassification
        whole = kind.from_pretrained(base, num_labels=count, dtype=torch.float32)
        config = LoraConfig(r=4, lora_alpha=8, fan_in_fan_out=True, **options)
        model = get_peft_model(whole, config).eval()
        for parameter, value in model.named_parameters():
            if "lora_B" in parameter or "modules_to_save" in parameter:
                value.data.normal_(0, 0.3)
        model.save_pretrained(folder / name)
        logits[name] = []
        for text in json.loads(texts.read_text(encoding="utf-8")):
            with torch.no_grad():
                made = model(**tokenizer(text, return_tensors="pt")).logits[0]
            logits[name].append(made.tolist() if of_tokens else [made.tolist()])
    answers.write_text(json.dumps(logits), encoding="utf-8")


if __name__ == "__main__":
    main()
