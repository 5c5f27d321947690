"""`kogpt2 latency-table`: measures seconds per token as the AWS guides to KoGPT2 do."""

from __future__ import annotations

import json
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from command.documents import check_writable, write_json
from command.errors import Problem
from command.options import option
from command.tables import table
from scripts.client.errors import CallFailed
from scripts.client.options import Target

PUBLISHED = Path(__file__).with_name("published_latency.json")


@dataclass(kw_only=True)
class LatencyTable(Target):
    model: str | None = option(
        None, "the fine-tune, with or without .tar.gz (default: the endpoint's only one)"
    )
    text: str = option("안녕하세요", "the prompt")
    name: str = option("here", "this machine's name in the table")
    calls: int = option(19, "measured requests, after one to warm up", min=1, metavar="N")
    json: Path | None = option(None, "write the numbers of each request", metavar="FILE")
    dry_run: bool = option(False, "print the request, and do not send it")


def run(options: LatencyTable) -> None:
    """Measure seconds per token as the AWS guides to KoGPT2 do, next to what they publish.

    One call to warm up, then 19 one after the other, each the guides' request: a JSON string,
    answered with [text, steps, seconds] once the text is at its end. "in the server" divides those
    seconds by the steps; "at the client" divides the whole time of a call.

    Examples:
    kogpt2 latency-table --model sowol
    kogpt2 latency-table --model sowol --text "산에는 꽃 피네" --name c5.2xlarge --json table.json
    kogpt2 latency-table --endpoint poets --region ap-northeast-2 --model sowol
    """
    from scripts.client.targets import Call, open_target

    if not options.text.strip():
        raise Problem("--text is empty")
    if options.json:
        check_writable(options.json)
    # The guides' client writes JSON in ASCII.
    target, call = open_target(options), Call(options.model, json.dumps(options.text).encode())
    if options.dry_run:
        print(target.describe(call))
        return
    results = measure(options, target, call)
    print("\n".join(lines(results)))
    if options.json:
        write_json(options.json, results)


def measure(options: LatencyTable, target: Any, call: Any) -> dict[str, Any]:
    """Measure the steps and seconds of each call. Raises `CallFailed`, `Problem`."""
    from tqdm import tqdm

    from scripts.client import answers

    calls = []
    for number in tqdm(range(-1, options.calls), desc="calls", disable=None):
        began = time.monotonic()
        with target.call(call) as answer:
            parsed = answers.read(answer)
        client_s = time.monotonic() - began
        if not parsed.tokens or parsed.server_s is None:
            raise CallFailed("the answer is not the guides' [text, steps, seconds]")
        if number >= 0:
            calls.append(
                {"steps": parsed.tokens, "server_s": parsed.server_s, "client_s": client_s}
            )
    return {"where": options.where, "name": options.name, "text": options.text, "calls": calls}


def lines(results: dict[str, Any]) -> list[str]:
    """Format a table of this machine and, as a ratio to it, the published ones."""
    published = json.loads(PUBLISHED.read_text(encoding="utf-8"))
    calls = results["calls"]
    server = [call["server_s"] / call["steps"] for call in calls]
    client = [call["client_s"] / call["steps"] for call in calls]
    here = statistics.mean(server)
    rows = [
        [f"{results['name']}, in the server", f"{here:.4f}", spread(server), ""],
        [f"{results['name']}, at the client", f"{statistics.mean(client):.4f}", spread(client), ""],
    ]
    for name, seconds in published["seconds_per_token"].items():
        rows.append([name, f"{seconds:.2f}", "", f"{seconds / here:.1f}x"])
    steps = statistics.median(call["steps"] for call in calls)
    return [
        f"{results['where']}: {len(calls)} calls after one to warm up, {steps:.0f} tokens each",
        "",
        table(["", "s per token", "least - most", "times here"], rows),
        "",
        f"The named machines: {published['source']}; {published['what']}.",
        "They ran KoGPT2 (12 layers, 768 units): only a model of that size compares.",
    ]


def spread(values: list[float]) -> str:
    return f"{min(values):.4f} - {max(values):.4f}"
