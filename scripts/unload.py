"""`kogpt2 unload`: unloads a model."""

from __future__ import annotations

from dataclasses import dataclass

from command.options import argument
from scripts.client.management import Management, call
from scripts.client.names import model_path


@dataclass(kw_only=True)
class Unload(Management):
    name: str = argument("the model")


def run(options: Unload) -> None:
    """Unload a model after its requests in flight have been answered.

    Examples:
    kogpt2 unload sowol
    """
    print(call(options, "DELETE", f"/models/{model_path(options.name)}")["status"])
