"""Counts the model loads (cold starts) during a load test, by the server's metrics."""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from typing import Any

import botocore.exceptions
import requests
from prometheus_client.parser import text_string_to_metric_families

from command.errors import Problem
from scripts.client.targets import session

CLOUDWATCH_DELAY_S = 90.0
METRICS_S = 2.0
# `{"source", "count", ...}`, or `{"source", "unknown": reason}`
Loads = Callable[[], dict[str, Any]]
SUMS = ("kogpt2_model_fetch_seconds_sum", "kogpt2_model_load_seconds_sum")


class Prometheus:
    """Counts a server's loads, from its creation until `end`, by the server's `/metrics`."""

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/") + "/metrics"
        self._before = self._read()

    def _read(self) -> dict[str, tuple[float, float]] | str:
        """Return (loads, their seconds) by model, or the reason why they are unknown."""
        try:
            with session(self._url) as calls:
                answer = calls.get(self._url, timeout=METRICS_S)
            answer.raise_for_status()
        except requests.RequestException as error:
            return f"{self._url} cannot be read ({type(error).__name__})"
        if "kogpt2_" not in answer.text:
            return f"{self._url} has none of this server's metrics"
        counts: defaultdict[str, float] = defaultdict(float)
        seconds: defaultdict[str, float] = defaultdict(float)
        for family in text_string_to_metric_families(answer.content.decode("utf-8")):
            for sample in family.samples:
                model = sample.labels.get("model", "")
                if sample.name == "kogpt2_model_load_seconds_count":
                    counts[model] += sample.value
                if sample.name in SUMS:
                    seconds[model] += sample.value
        return {model: (count, seconds[model]) for model, count in counts.items()}

    def end(self) -> dict[str, Any]:
        before, after = self._before, self._read()
        if isinstance(before, str):
            return {"source": "/metrics", "unknown": before}
        if isinstance(after, str):
            return {"source": "/metrics", "unknown": after}
        models = {}
        for name, (count, seconds) in after.items():
            count_before, seconds_before = before.get(name, (0.0, 0.0))
            if count > count_before:
                mean = (seconds - seconds_before) / (count - count_before)
                models[name] = {"count": int(count - count_before), "mean_s": mean}
        total = sum(m["count"] for m in models.values())
        seconds = sum(m["count"] * m["mean_s"] for m in models.values())
        mean_s = seconds / total if total else None
        return {"source": "/metrics", "count": total, "mean_s": mean_s, "models": models}


class CloudWatch:
    """CloudWatch's metrics of a multi-model endpoint, which arrive over a minute after the run.

    ModelCacheHit has a sample per request: 1 if the model was loaded already, otherwise 0.
    """

    def __init__(
        self,
        endpoint: str,
        client: Any,
        wait: Callable[[float], None] = time.sleep,
        delay_s: float = CLOUDWATCH_DELAY_S,
    ) -> None:
        self._endpoint, self._client = endpoint, client
        self._wait, self._delay_s = wait, delay_s
        self._began = datetime.now(timezone.utc)

    def end(self) -> dict[str, Any]:
        ended = datetime.now(timezone.utc) + timedelta(minutes=1)
        self._wait(self._delay_s)
        try:
            hits = self._sums("ModelCacheHit", ended)
            loading = self._sums("ModelLoadingTime", ended)  # microseconds
        except (botocore.exceptions.BotoCoreError, botocore.exceptions.ClientError) as error:
            return {"source": "CloudWatch", "unknown": str(error)}
        if not hits["SampleCount"]:
            return {"source": "CloudWatch", "unknown": "there are no ModelCacheHit metrics yet"}
        cold: dict[str, Any] = {"count": round(hits["SampleCount"] - hits["Sum"])}
        if loading["SampleCount"]:
            cold["mean_s"] = loading["Sum"] / loading["SampleCount"] / 1e6
        return {"source": "CloudWatch", **cold}

    def _sums(self, metric: str, ended: datetime) -> dict[str, float]:
        answer = self._client.get_metric_statistics(
            Namespace="AWS/SageMaker",
            MetricName=metric,
            Dimensions=[
                {"Name": "EndpointName", "Value": self._endpoint},
                {"Name": "VariantName", "Value": "AllTraffic"},
            ],
            StartTime=self._began - timedelta(minutes=1),
            EndTime=ended,
            Period=60,
            Statistics=["Sum", "SampleCount"],
        )
        return {
            name: sum(point[name] for point in answer["Datapoints"])
            for name in ("Sum", "SampleCount")
        }


def not_counted() -> dict[str, Any]:
    return {"source": None, "unknown": "--cloudwatch reads them"}


def check_answers(url: str) -> None:
    """Raise `Problem` unless something listens at a server's URL."""
    try:
        with session(url) as calls:
            calls.head(url, timeout=METRICS_S)
    except requests.ReadTimeout:
        pass  # a slow answer is one
    except requests.ConnectionError:
        raise Problem(f"{url} does not answer: start the server with ./scripts/serve") from None


def models_of(url: str) -> tuple[str, ...]:
    """Return the names of the models in a server's store. Raises `Problem`."""
    try:
        with session(url, os.environ.get("INFERENCE_TOKEN")) as calls:
            answer = calls.get(f"{url.rstrip('/')}/models?available=true", timeout=30)
        if answer.status_code == 401:
            raise Problem(f"{url} requires a token: set INFERENCE_TOKEN")
        answer.raise_for_status()
        names = tuple(model["modelName"] for model in answer.json()["models"])
    except (requests.RequestException, ValueError, KeyError, TypeError):
        raise Problem(f"{url} does not list its models: give --models") from None
    if not names:
        raise Problem(f"the store of {url} is empty")
    return names
