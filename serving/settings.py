"""The server's settings: environment variables, and the options of `serve` that override them."""

from __future__ import annotations

import argparse
import functools
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

from common.errors import SettingError
from common.settings import comma_separated, read_settings, setting
from serving.errors import UrlNotAllowed
from serving.names import model_name

REPOSITORY = Path(__file__).resolve().parent.parent

MAX_PORT = 65535
LIMITS = {  # largest allowed values; the smallest is 1
    "port": MAX_PORT, "management_port": MAX_PORT,
    "script_workers": math.inf, "max_rows": math.inf, "max_waiting": math.inf,
    "max_connections": math.inf, "request_timeout_s": math.inf, "start_timeout_s": math.inf,
}  # fmt: skip


@dataclass(frozen=True)
class Settings:
    """Each field is an environment variable; docs/reference/settings.md lists them."""

    host: str = setting("HOST", "0.0.0.0", "the address to listen on", "--host")  # noqa: S104
    allowed_hosts: str = setting(
        "ALLOWED_HOSTS",
        "",
        "comma-separated host names for requests, beside localhost and IP addresses"
        " (`*.example.com`, `*`); empty: none where `HOST` is a loopback address, else any",
    )
    port: int = setting("SAGEMAKER_BIND_TO_PORT", 8080, "the port for requests", "--port")
    management_port: int = setting(
        "MANAGEMENT_PORT",
        8081,
        "the port for loading and unloading; may be the one for requests",
        "--management-port",
    )
    grpc_port: int = setting(
        "GRPC_PORT", 0, "the port for gRPC (docs/api/open-inference-protocol.md); 0: none"
    )
    otlp_endpoint: str = setting(
        "OTEL_EXPORTER_OTLP_ENDPOINT",
        "",
        "where traces are sent to (docs/operate/monitoring.md); also"
        " `OTEL_EXPORTER_OTLP_TRACES_ENDPOINT`",
        also="OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
    )
    model_store: str = setting(
        "MODEL_STORE",
        str(REPOSITORY / "model_store"),
        "a folder, `s3://bucket/prefix/`, `abfs://` or `gs://` with a folder or `.tar.gz` a model",
        "--model-store",
    )
    model_bases: str = setting(
        "MODEL_BASES",
        "",
        "comma-separated bases in the store, by the names that adapters and fine-tunes have for"
        " them, or by fine-tunes' own: `skt/kogpt2-base-v2=kogpt2,poems-*=kogpt2`"
        " (docs/models/deltas.md)",
    )
    model_cache: str = setting(
        "MODEL_CACHE", "", "where fetched models are unpacked; empty: in `RUN_DIR`"
    )
    run_dir: str = setting("RUN_DIR", "", "sockets and temporary files; empty: a new folder")
    run_as_user: int = setting(
        "RUN_AS_USER",
        0,
        "the user that a server started as root becomes, 10001 in the images"
        " (docs/operate/security.md); 0: root",
    )
    cache_max_mib: int = setting(
        "CACHE_MAX_MIB", 20_480, "disk that fetched models may take; the least recently used go"
    )
    model_max_mib: int = setting(
        "MODEL_MAX_MIB", 4096, "a fetched model that takes more unpacked gets 400"
    )
    https_hosts: str = setting(
        "HTTPS_HOSTS", "", "comma-separated hosts that models may be fetched from by https"
    )
    preload_models: str = setting(
        "PRELOAD_MODELS", "", "comma-separated models to load before the server is ready"
    )
    sagemaker_multi_model: bool = setting(
        "SAGEMAKER_MULTI_MODEL",
        False,
        "SageMaker decides what is loaded: calls load nothing by themselves",
    )
    base_dir: str = setting(
        "SAGEMAKER_BASE_DIR", "/opt/ml", "where SageMaker puts models (`model/`, `models/`)"
    )
    single_model_name: str = setting(
        "SAGEMAKER_MODEL_NAME", "model", "what the model in `model/` is called"
    )
    management_token: str = setting(
        "MANAGEMENT_TOKEN",
        "",
        "the bearer token for loading and unloading, with `INFERENCE_TOKEN` for lists of models;"
        " empty: `INFERENCE_TOKEN`",
    )
    inference_token: str = setting(
        "INFERENCE_TOKEN", "", "the bearer token for calls; empty: none is needed"
    )
    tokens_file: str = setting(
        "TOKENS_FILE",
        "",
        "a file of tokens for teams (docs/reference/settings.md)",
    )
    max_request_bytes: int = setting(
        "MAX_REQUEST_BYTES", 6_553_500, "a longer body gets 413 (MMS's own limit)"
    )
    load_timeout_s: int = setting(
        "LOAD_TIMEOUT_S", 300, "a model that takes longer to fetch and load gets 504"
    )
    drain_s: int = setting(
        "DRAIN_S", 25, "how long a stop waits for requests in flight (SageMaker kills after 30 s)"
    )
    workers_per_model: int = setting(
        "WORKERS_PER_MODEL",
        0,
        "requests to one model that are worked on at once; 0: as many as `ENGINE_MAX_ROWS`",
    )
    max_rows: int = setting("ENGINE_MAX_ROWS", 16, "sequences of one model that share a step")
    max_waiting: int = setting(
        "MAX_WAITING", 256, "requests of one model that wait for a place; one more gets 429"
    )
    max_connections: int = setting(
        "MAX_CONNECTIONS",
        4096,
        "clients' connections to each port, a sixteenth of them for health; one more ends the one"
        " that has been silent for longest, on gRPC it is refused",
    )
    script_workers: int = setting(
        "SCRIPT_WORKERS",
        1,
        "processes of a model with its own script; else `SAGEMAKER_MODEL_SERVER_WORKERS`",
        also="SAGEMAKER_MODEL_SERVER_WORKERS",
    )
    handler: str = setting(
        "SAGEMAKER_HANDLER",
        "",
        "`service:handle`: answers for models that hold such a file and name no other",
    )
    request_timeout_s: int = setting(
        "REQUEST_TIMEOUT_S",
        60,
        "seconds from a request's headers to its answer's end, loading included; then 504",
    )
    jvm_options: str = setting(
        "SAGEMAKER_MODEL_SERVER_VMARGS",
        "-Xmx256m -XX:+UseSerialGC -XX:-UsePerfData -XX:+ExitOnOutOfMemoryError"
        " -XX:TieredStopAtLevel=1 -XX:CompileThresholdScaling=0.1",
        "options of MMS's Java process",
    )
    worker_variables: str = setting(
        "WORKER_VARIABLES",
        "",
        "more variables for workers and scripts: comma-separated names or patterns (`MY_*`)",
    )
    start_timeout_s: int = setting(
        "START_TIMEOUT_S",
        60,
        "seconds after which a server that has not started gives up, models to preload aside",
    )
    backend: str = setting(
        "ENGINE_BACKEND",
        "mxnet",
        "what computes: `mxnet` or `native`; on a GPU `mxnet` or `onnxruntime`",
    )
    precision: str = setting(
        "ENGINE_PRECISION",
        "",
        "on a CPU `int8` (the default) or `fp32`; on a GPU mxnet has `fp32`, onnxruntime `fp16`"
        " (docs/start/precision.md)",
    )
    device: str = setting("ENGINE_DEVICE", "cpu", "`cpu` or `gpu`")
    show_examples: bool = setting("SHOW_EXAMPLES", False, "print what to type once it is ready")

    def __post_init__(self) -> None:
        if not self.management_token:  # loading needs a token where requests do
            object.__setattr__(self, "management_token", self.inference_token)
        for f in fields(self):
            most, value = LIMITS.get(f.name), getattr(self, f.name)
            if most is not None and not 1 <= value <= most:
                allowed = "at least 1" if most == math.inf else f"from 1 to {most}"
                raise SettingError(f"{f.metadata['variable']} is {value}, must be {allowed}")
        if self.grpc_port > MAX_PORT or self.grpc_port in self.ports:
            raise SettingError(
                f"GRPC_PORT is {self.grpc_port}, must be a port of its own, or 0 for none"
            )
        module = self.handler.partition(":")[0].removesuffix(".py")
        # SageMaker's toolkits set their own handler_service; this server's does the same work.
        if ("." in module or module.startswith("/")) and not module.endswith("handler_service"):
            raise SettingError(
                f"SAGEMAKER_HANDLER is {self.handler:.200}, must name a file in the models, such as"
                " service:handle: a module of the image does not serve them"
            )
        try:
            model_name(self.single_model_name)
        except UrlNotAllowed as error:
            raise SettingError(f"SAGEMAKER_MODEL_NAME: {error.message}") from None

    @property
    def requests_at_once(self) -> int:
        """The number of requests that one model answers at the same time."""
        return self.workers_per_model or self.max_rows

    @functools.cached_property
    def host_names(self) -> tuple[str, ...]:
        """Allowed `Host` headers, as patterns; IP addresses and localhost are always allowed."""
        is_loopback = self.host in ("localhost", "::1") or self.host.startswith("127.")
        names = tuple(comma_separated(self.allowed_hosts.lower()))
        return names or (() if is_loopback else ("*",))

    @property
    def ports(self) -> tuple[int, ...]:
        """The HTTP ports to listen on: two, or one if requests and management share a port."""
        return tuple(dict.fromkeys((self.port, self.management_port)))

    @classmethod
    def read(
        cls, options: Sequence[str] = (), environment: Mapping[str, str] = os.environ
    ) -> Settings:
        """Read the settings from the environment and from options, which take precedence.

        Raises `SettingError` with the name of the variable.
        """
        if environment.get("ADAPTER_BASES"):
            raise SettingError("ADAPTER_BASES is now MODEL_BASES")
        settings = read_settings(cls, environment)
        values = vars(_parser(cls).parse_args(options))
        return replace(settings, **{k: v for k, v in values.items() if v is not None})

    def environment(self) -> dict[str, str]:
        """Return the settings as environment variables for a child process."""
        values = {f: getattr(self, f.name) for f in fields(self)}
        return {
            f.metadata["variable"]: str(value).lower() if isinstance(value, bool) else str(value)
            for f, value in values.items()
        }


def _parser(settings: type[Settings]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="serve", description="Serves KoGPT2 fine-tunes.", epilog="Example: serve --port 9000"
    )
    for f in fields(settings):
        if f.metadata["option"]:
            parser.add_argument(
                f.metadata["option"],
                dest=f.name,
                type=int if f.type == "int" else str,
                help=f"{f.metadata['help']} (default {f.default}; {f.metadata['variable']})",
            )
    return parser
