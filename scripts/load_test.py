"""Load on a server or an endpoint, and a report."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from command.environments import use_load_environment
from command.errors import Problem
from command.options import option, seconds
from scripts.client.options import Sampling, Target
from scripts.traffic import compare, plan

MAX_S = 3600


@dataclass(kw_only=True)
class LoadTest(Target, Sampling):
    models: str | None = option(
        None, "the most popular first, or @FILE (the server's store)", metavar="A,B,..."
    )
    zipf: float = option(1.0, "the k-th gets 1/k^S; 0: all alike", min=0, max=10, metavar="S")
    prompts: Path | None = option(None, "one a line, UTF-8 (five short ones)", metavar="FILE")
    users: int | None = option(None, "clients that wait for answers (4)", min=1, metavar="N")
    rate: float | None = option(
        None, "requests a second, instead of --users", parser=seconds, metavar="R"
    )
    seconds: float = option("30", f"what is measured, {MAX_S} at most", parser=seconds, metavar="S")
    warm_up: float = option(0.0, "before it, not counted", min=0, max=MAX_S, metavar="S")
    stream: bool = option(False, "ask for streams, to measure the first token")
    order_seed: int = option(0, "of models and prompts", metavar="N")
    json: Path | None = option(None, "write the results", metavar="FILE")
    html: Path | None = option(None, "write them as a page", metavar="FILE")
    web: int | None = option(
        None, "show Locust's page on this port of 127.0.0.1 meanwhile", min=1, metavar="PORT"
    )
    cloudwatch: bool = option(False, "ask for an endpoint's cold starts (90 s more)")
    dry_run: bool = option(False, "print the plan and a call, and send nothing")
    compare: tuple[Path, Path] | None = option(
        None, "show two results, and test nothing", metavar="JSON JSON"
    )


def run(options: LoadTest) -> int:
    """Puts load on a server of yours or on a SageMaker endpoint, with Locust, and reports.

    Several models are called, popular ones more often (Zipf). --users are clients that wait for
    their answers; --rate is requests a second that come whether answers do or not. The report has
    latencies (p50 to p99), the time to the first token where answers are streamed, errors, cold
    starts, and tokens a second by model: as text, and as JSON and HTML with --json and --html. It
    ends after --seconds, and what --timeout leaves to the last answers.

    The first run makes .venv-load. A test of an endpoint costs what its instances cost. It fails
    where requests were not answered.

    Examples:
    kogpt2 load-test --models sowol,dongju --users 4 --seconds 20
    kogpt2 load-test --rate 5 --seconds 60 --prompts prompts.txt --json a.json --html a.html
    kogpt2 load-test --compare a.json b.json
    kogpt2 load-test --endpoint poets --region ap-northeast-2 --models sowol,dongju --rate 2
    kogpt2 load-test --users 8 --web 8089        Locust's page at http://127.0.0.1:8089 meanwhile
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
    """Finds what can be found before anything slow begins. Raises `Problem`."""
    if options.users is not None and options.rate is not None:
        raise Problem("give --users or --rate, not both")
    if not options.seconds <= MAX_S:
        raise Problem(f"--seconds is {options.seconds:g}, at most {MAX_S} are allowed")
    if options.cloudwatch and options.endpoint is None:
        raise Problem("--cloudwatch is for --endpoint")
    if options.stream and options.endpoint and options.models:
        raise Problem("SageMaker streams from endpoints of a single model only: leave out --stream")
    for path in (options.json, options.html):
        if path is not None and not path.absolute().parent.is_dir():
            raise Problem(f"there is no folder {path.parent} to write {path.name} into")


def measure(options: LoadTest, models: tuple[str, ...] | None, prompts: tuple[str, ...]) -> int:
    from scripts.traffic import run  # first: Locust patches what the others import

    # isort: split
    from scripts.client.targets import open_target
    from scripts.traffic import loads, report

    target = open_target(options)
    if options.url is not None:
        models = models or loads.models_of(options.url)
        counter: loads.Loads = loads.Prometheus(options.url)
    elif options.cloudwatch and options.endpoint:
        counter = loads.CloudWatch(
            options.endpoint, options.region, options.profile, run.sleep_with_bar
        )
    else:
        counter = loads.Unknown("--cloudwatch asks for them")
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
    results = run.run(made, target, counter, options.web)
    print("\n".join(report.lines(results)))
    try:
        if options.json:
            text = json.dumps(results, ensure_ascii=False, indent=1)
            options.json.write_text(text + "\n", encoding="utf-8")
        if options.html:
            report.write_html(results, options.html)
    except OSError as error:
        raise Problem(f"cannot write {error.filename}: {error.strerror}") from None
    return 1 if results["all"]["errors"] else 0
