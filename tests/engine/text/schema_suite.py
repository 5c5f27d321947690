"""Holds random answers to the schemas of JSON-Schema-Test-Suite, and validates what comes.

    python -m tests.engine.text.schema_suite FOLDER

FOLDER is a checkout of https://github.com/json-schema-org/JSON-Schema-Test-Suite. Prints how many
schemas are refused and why, how many answers were complete, and each that is not valid; ends with 1
where there is one.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jsonschema import Draft7Validator, Draft201909Validator, Draft202012Validator

from common.errors import InvalidRequest
from common.form import json_schema
from engine.text.constraint import Vocabulary
from engine.text.table import BYTES
from tests.engine.text.test_constraint import constrain, draw, table_of, vocabulary_of

DRAFTS = {
    "draft2020-12": Draft202012Validator,
    "draft2019-09": Draft201909Validator,
    "draft7": Draft7Validator,
}
ANSWERS = 5  # to each schema
TOKENS = 400


def schemas(folder: Path) -> Iterator[tuple[str, Any, Any]]:
    """Each one's name, itself, and its draft's validator."""
    for draft, validator in DRAFTS.items():
        for file in sorted((folder / "tests" / draft).rglob("*.json")):
            for group in json.loads(file.read_text(encoding="utf-8")):
                name = f"{draft}/{file.stem}: {group['description']}"
                yield name, group["schema"], validator


def main(folder: Path) -> int:
    with vocabulary_of(table_of(BYTES)) as vocabulary:
        return _main(folder, vocabulary)


def _main(folder: Path, vocabulary: Vocabulary) -> int:
    counts, reasons, wrong = Counter[str](), Counter[str](), list[str]()
    for name, schema, validator in schemas(folder):
        counts["schemas"] += 1
        try:
            form = json_schema("schema", schema)
            constrain(vocabulary, form)
        except InvalidRequest as error:
            counts["refused"] += 1
            reasons[reason(error.message)] += 1
            continue
        counts["held to"] += 1
        for seed in range(ANSWERS):
            try:
                text, complete = draw(vocabulary, form, seed, TOKENS, end=2.0)
            except InvalidRequest as error:
                counts["answers refused on the way"] += 1
                reasons[reason(error.message)] += 1
                break
            counts["complete answers" if complete else "answers cut off"] += 1
            # Python's expressions know no Unicode properties.
            known = "\\p{" not in form.source[0]
            if complete and not is_valid(validator(schema if known else True), text):
                wrong.append(f"{name}: {text}")
    for found in (counts, reasons):
        print(*(f"{count:6} {what}" for what, count in found.most_common()), "", sep="\n")
    print(f"{len(wrong)} answers are not valid", *wrong, sep="\n")
    return 1 if wrong else 0


def is_valid(validator: Any, text: str) -> bool:
    """Whether a text is JSON, and by the schema; what would have to be fetched is not looked at."""
    try:
        return bool(validator.is_valid(json.loads(text)))
    except ValueError:
        return False
    except Exception as error:
        return "Unresolvable" in type(error).__name__ or "Unresolvable" in str(error)


def reason(message: str) -> str:
    """Return the reason of a refusal without what differs from schema to schema."""
    message = re.sub(r"parameters.json_schema: (at \d+\(\d+\): )?", "", message)
    message = re.sub(r"\| ?\d+ \|.*| 1 \| .*", "", message)
    return re.sub(r"\{.*\}|\[.*\]|\"[^\"]*\"", "...", message)[:110]


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
