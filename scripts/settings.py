"""`kogpt2 settings`: prints the server's environment variables."""

from __future__ import annotations

from dataclasses import dataclass, fields

from command.environments import ROOT


@dataclass(kw_only=True)
class SettingsOptions:
    """No options."""


def run(options: SettingsOptions) -> None:
    """Print the environment variables of the server as the table of docs/reference/settings.md.

    Examples:
    kogpt2 settings
    """
    import engine.settings
    import handlers.settings
    import serving.settings

    print("| variable | default | |\n|---|---|---|")
    seen = set()
    for settings in (serving.settings, engine.settings, handlers.settings):
        for field in fields(settings.Settings):
            variable = field.metadata["variable"]
            if variable in seen or "`serve` sets it" in field.metadata["help"]:
                continue
            seen.add(variable)
            default = str(field.default).replace(f"{ROOT}/", "")
            shown = f"`{default}`" if default else "none"
            print(f"| `{variable}` | {shown} | {field.metadata['help']} |")
