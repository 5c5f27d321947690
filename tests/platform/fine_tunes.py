"""Fine-tunes in S3 with distinct texts, and clients that check their answers."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

from botocore.exceptions import ClientError

from engine.engine import Engine
from engine.settings import Settings
from tests.e2e.stores import SHORT, packed, small
from tests.engine.engines import Request
from tests.serving.store.s3 import S3Server

PREFIX = "fine-tunes/"


def publish(s3: S3Server, folder: Path, count: int) -> dict[str, str]:
    """Puts small models into S3. Returns each one's text for `SHORT` by TargetModel."""
    texts = {}
    with closing(Engine(Settings(backend="native", precision="fp32", memory_mib=64))) as engine:
        for seed in range(count):
            name = (f"m{seed}", f"team/m{seed}", f"시/봄-{seed}")[seed % 3]
            path = small(folder / f"m{seed}", seed)
            archive = packed(path, folder / f"m{seed}.tar.gz")
            s3.put(f"{PREFIX}{name}.tar.gz", archive.read_bytes())
            engine.load(name, str(path))
            request = Request(engine, name, str(SHORT["inputs"]), **SHORT["parameters"])  # type: ignore[arg-type]
            texts[f"{name}.tar.gz"] = request.wait().text()
            engine.unload(name)
    assert len(set(texts.values())) == count, "two models have the same text"
    return texts


def invoke(client: Any, target: str) -> str:
    """The text of a model of the endpoint `poets`."""
    answer = client.invoke_endpoint(
        EndpointName="poets",
        TargetModel=target,
        ContentType="application/json",
        Body=json.dumps(SHORT).encode(),
    )
    text: str = json.loads(answer["Body"].read())["generated_text"]
    return text


def invoke_all(
    client: Any, texts: Mapping[str, str], *, calls: int, clients: int = 6, seed: int = 0
) -> Counter[str]:
    """Calls every model once and then by popularity, `calls` in all, from several clients.

    Counts `right`, `wrong`, and errors by their code.
    """
    chance = random.Random(seed)  # noqa: S311
    targets = list(texts)
    chance.shuffle(targets)
    weights = [1 / rank for rank in range(1, len(targets) + 1)]
    plan = [*targets, *chance.choices(targets, weights, k=max(calls - len(targets), 0))]

    def outcome(target: str) -> str:
        try:
            return "right" if invoke(client, target) == texts[target] else "wrong"
        except ClientError as error:
            print(target, error)  # pytest shows it where this is not expected
            return str(error.response["Error"]["Code"])

    with ThreadPoolExecutor(clients) as pool:
        return Counter(pool.map(outcome, plan))
