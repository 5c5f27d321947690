"""`kogpt2 load-test`: puts load on a server or an endpoint and reports latencies."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from command.documents import check_writable, write_json
from command.environments import use_load_environment
from command.errors import Problem
from command.options import option, seconds
from scripts.aws.account import Account
from scripts.client.options import Sampling, Target
from scripts.traffic import compare, plan

MAX_S = 3600


@dataclass(kw_only=True)
class LoadTest(Target, Sampling):
    models: str | None = option(
        None, "most popular first, or @FILE (default: all of the server's store)", metavar="A,B,..."
    )
    zipf: float = option(
        1.0,
        "exponent of the popularity: the k-th model gets 1/k^S of the requests",
        min=0,
        max=10,
        metavar="S",
    )
    prompts: Path | None = option(
        None, "prompts, one a line, UTF-8 (default: five short ones)", metavar="FILE"
    )
    users: int | None = option(
        None, "concurrent clients, which wait for answers (4)", min=1, metavar="N"
    )
    rate: float | None = option(
        None, "requests a second, sent without waiting for answers", parser=seconds, metavar="R"
    )
    seconds: float = option(
        "30", f"length of the measurement, {MAX_S} at most", parser=seconds, metavar="S"
    )
    warm_up: float = option(
        0.0, "seconds before it that are not measured", min=0, max=MAX_S, metavar="S"
    )
    stream: bool = option(False, "request streams and measure the time to the first token")
    order_seed: int = option(0, "seed of the order of models and prompts", metavar="N")
    json: Path | None = option(None, "write the results as JSON", metavar="FILE")
    web: int | None = option(
        None,
        "serve Locust's page on this port of 127.0.0.1 during the test",
        min=1,
        max=65535,
        metavar="PORT",
    )
    cloudwatch: bool = option(False, "read the endpoint's cold starts from CloudWatch (90 s more)")
    dry_run: bool = option(False, "print the plan and a request, and send nothing")
    compare: tuple[Path, Path] | None = option(
        None, "compare the results of two tests", metavar="JSON JSON"
    )


def run(options: LoadTest) -> int:
    """Put load on a server of yours or on a SageMaker endpoint, with Locust, and report.

    Popular models get more requests (Zipf). --users are clients that wait for their answers;
    --rate is requests a second that are sent whether or not earlier ones were answered. The report
    has latencies (p50 to p99), the time to the first token of streams, errors, cold starts, and
    tokens a second by model: as text, and with --json as JSON. It ends --timeout after --seconds at
    the latest.

    The first run installs Locust into .venv-load. Endpoints cost money while they are tested. The
    exit status is 1 if a request failed.

    Examples:
    kogpt2 load-test --models sowol,dongju --users 4 --seconds 20
    kogpt2 load-test --rate 5 --seconds 60 --prompts prompts.txt --json a.json
    kogpt2 load-test --compare a.json b.json
    kogpt2 load-test --endpoint poets --region ap-northeast-2 --models sowol,dongju --rate 2
    kogpt2 load-test --users 8 --web 8089        with Locust's page at http://127.0.0.1:8089
    """
    if options.compare:
        print("\n".join(compare.lines(*map(compare.read, options.compare))))
        return 0
    check(options)
    prompts = plan.read_prompts(options.prompts)
    models = plan.read_models(options.models) if options.models else None
    options.parameters_given()
    use_load_environment()
    return measure(options, models, prompts)


def check(options: LoadTest) -> None:
    """Check the options before anything slow starts. Raises `Problem`."""
    if options.users is not None and options.rate is not None:
        raise Problem("give --users or --rate, not both")
    if not options.seconds <= MAX_S:
        raise Problem(f"--seconds is {options.seconds:g}, at most {MAX_S} are allowed")
    if options.cloudwatch and options.endpoint is None:
        raise Problem("--cloudwatch is for --endpoint")
    if options.stream and options.endpoint and options.models:
        raise Problem("SageMaker streams from endpoints of a single model only: leave out --stream")
    if options.json is not None:
        check_writable(options.json)


def measure(options: LoadTest, models: tuple[str, ...] | None, prompts: tuple[str, ...]) -> int:
    from scripts.traffic import run  # first: Locust patches modules that the others import

    # isort: split
    from scripts.client.targets import open_target
    from scripts.traffic import loads, report

    target = open_target(options)
    if options.url is not None:
        if not options.dry_run or models is None:
            loads.check_answers(options.url)
        models = models or loads.models_of(options.url)
        count_loads: loads.Loads = loads.Prometheus(options.url).end
    elif options.cloudwatch and options.endpoint:
        client = Account(options).client("cloudwatch")
        count_loads = loads.CloudWatch(options.endpoint, client, run.sleep_with_bar).end
    else:
        count_loads = loads.not_counted
    made = plan.Plan(
        where=options.where,
        models=models or ("",),
        prompts=prompts,
        parameters=options.parameters_given(),
        zipf=options.zipf,
        users=options.users or 4,
        rate=options.rate,
        seconds=options.seconds,
        warm_up_s=options.warm_up,
        timeout_s=options.timeout,
        stream=options.stream,
        seed=options.order_seed,
    )
    if options.dry_run:
        print("\n".join(report.plan_lines(made, target)))
        return 0
    results = run.run(made, target, count_loads, options.web)
    print("\n".join(report.lines(results)))
    if options.json:
        write_json(options.json, results)
    return 1 if results["all"]["errors"] else 0
