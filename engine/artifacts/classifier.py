"""The heads of classifiers: GPT2ForSequenceClassification and GPT2ForTokenClassification."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from common.errors import ArtifactError
from engine.artifacts.tensor_index import Index

# Our names of a head's tensors, which are computed beside the model and not by its pass.
WEIGHT, BIAS = "classifier.weight", "classifier.bias"
# The architectures of classifiers, with the module that has the head.
MODULES = {
    "GPT2ForSequenceClassification": "score",
    "GPT2ForTokenClassification": "classifier",
}
TOKENS = MODULES["GPT2ForTokenClassification"]
# What makes scores of logits, by `problem_type`, as transformers' pipeline does.
FUNCTIONS = {
    "single_label_classification": "softmax",
    "multi_label_classification": "sigmoid",
    "regression": "none",
}
MAX_LABELS = 1000  # each text's answer has a number for each


@dataclass(frozen=True)
class Classifier:
    """What a classifier's outputs mean.

    labels: the name of each output
    function: what makes scores of logits, one of `FUNCTIONS`
    pad_id: the token that is ignored at a text's end; -1: none is
    of_tokens: whether each token has labels, not the whole text
    """

    labels: tuple[str, ...]
    function: str = "softmax"
    pad_id: int = -1
    of_tokens: bool = False

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: Any) -> Classifier:
        """Raise `KeyError`, `TypeError`, `ValueError` for other values than `to_json` returns."""
        labels = tuple(str(label) for label in value["labels"])
        function, pad_id, of_tokens = value["function"], value["pad_id"], value["of_tokens"]
        if not 0 < len(labels) <= MAX_LABELS or function not in FUNCTIONS.values():
            raise ValueError("labels")
        if type(pad_id) is not int or type(of_tokens) is not bool:
            raise ValueError("pad_id")
        return cls(labels, function, pad_id, of_tokens)

    def check_head(self, head: Index, units: int, file: str) -> None:
        """Raise `ArtifactError` unless the tensors are those of this classifier's head."""
        shapes = {WEIGHT: (len(self.labels), units), BIAS: (len(self.labels),)}
        if WEIGHT not in head or (self.of_tokens and BIAS not in head):
            raise ArtifactError(f"{file} lacks the weight or bias of its head")
        for name, tensor in head.items():
            if tensor.shape != shapes[name]:
                raise ArtifactError(
                    f"{file}: the head's {name} is {tensor.shape}, must be {shapes[name]}: a row"
                    " for each label"
                )
            if tensor.dtype not in ("float16", "bfloat16", "float32", "float64"):
                raise ArtifactError(f"{file}: the head's {name} is {tensor.dtype}, must be floats")


def module_of(fields: Mapping[str, Any], weights: Index, prefix: str) -> str | None:
    """Return the module of a classifier's head, such as `score`; None for other models.

    prefix: what a wrapper puts in front of the names of modules
    """
    if architectures := fields.get("architectures"):
        return MODULES.get(architectures[0])
    if f"{prefix}lm_head.weight" in weights:  # what follows is written by a wrapper
        return None
    return next((m for m in MODULES.values() if f"{prefix}{m}.weight" in weights), None)


def read_head(
    fields: Mapping[str, Any],
    source: str,
    weights: Index,
    module: str,
    file: str,
    units: int | None = None,
) -> tuple[Classifier, Index]:
    """Return a classifier by its configuration, and its head's tensors by our names.

    source: the file that `fields` are from
    module: the head's name in `weights`, with its prefix
    units: of the model, if they are known
    """
    head: Index = {}
    for ours, part in ((WEIGHT, "weight"), (BIAS, "bias")):
        if f"{module}.{part}" in weights:
            head[ours] = weights[f"{module}.{part}"]
    of_tokens = module.rpartition(".")[2] == TOKENS
    if WEIGHT not in head or (of_tokens and BIAS not in head):
        part = "weight" if WEIGHT not in head else "bias"
        raise ArtifactError(f"{file} lacks {module}.{part}, the head of a classifier")
    shape = head[WEIGHT].shape
    if len(shape) != 2 or not shape[0] or units not in (None, shape[1]):
        size = "numbers" if units is None else units
        raise ArtifactError(
            f"{file}: {module}.weight is {shape}, must have a row of {size} for each label"
        )
    labels = _labels(fields, source, shape[0], f"{module}.weight in {file}")
    problem = fields.get("problem_type")
    if problem is not None and problem not in list(FUNCTIONS):
        raise ArtifactError(
            f"{source}: problem_type is {problem!r}, must be one of {', '.join(FUNCTIONS)}"
        )
    if problem == "single_label_classification" and len(labels) == 1:
        raise ArtifactError(f"{source}: problem_type {problem} needs more than one label")
    function = "softmax" if len(labels) > 1 or of_tokens else "sigmoid"
    if problem and not of_tokens:
        function = FUNCTIONS[problem]
    pad = fields.get("pad_token_id")
    if pad is not None and type(pad) is not int:
        raise ArtifactError(f"{source}: pad_token_id is {pad!r}, must be a token id")
    classifier = Classifier(labels, function, -1 if pad is None else pad, of_tokens)
    classifier.check_head(head, shape[1], file)
    return classifier, head


def _labels(fields: Mapping[str, Any], source: str, count: int, where: str) -> tuple[str, ...]:
    """Return the names of `count` labels, by default LABEL_0, LABEL_1, ... as in transformers."""
    if count > MAX_LABELS:
        raise ArtifactError(f"{where} has {count} labels, at most {MAX_LABELS} can be")
    given, number = fields.get("id2label"), fields.get("num_labels")
    if given is None:
        if number is not None and number != count:
            raise ArtifactError(f"{source}: num_labels is {number!r}, but {where} has {count} rows")
        if number is None and count > 2:  # transformers writes none for two
            raise ArtifactError(
                f'{source} lacks id2label, such as {{"0": "negative", ...}}: a name for each of the'
                f" {count} rows of {where}"
            )
        return tuple(f"LABEL_{i}" for i in range(count))
    by_id = given if isinstance(given, dict) else {}
    names = [by_id.get(str(i)) for i in range(count)]
    fit = len(by_id) == count and all(isinstance(name, str | int | float) for name in names)
    if not fit or number not in (None, count):
        raise ArtifactError(
            f"{source}: id2label has {len(by_id)} entries"
            f"{'' if number is None else f' and num_labels is {number!r}'}, must have a text for"
            f' each of the {count} rows of {where}, from "0" to "{count - 1}"'
        )
    return tuple(map(str, names))
