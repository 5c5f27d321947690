"""Adds to moto what `cloud` lists."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from moto.cloudformation import parsing
from moto.cloudformation.models import CloudFormationBackend
from moto.cloudformation.utils import yaml_tag_constructor
from moto.core.responses import ActionResult, BaseResponse
from moto.sagemaker import responses
from moto.sagemaker.models import FakeEndpoint, FakeEndpointConfig

from scripts.aws.template import template


def fill_gaps(patch: pytest.MonkeyPatch, made: Any) -> None:
    """`made` is the `Cloud` that decides what is in progress or fails."""
    yaml.CLoader.add_multi_constructor("", yaml_tag_constructor)
    patch.setattr("yaml.Loader", yaml.CLoader)  # moto reads a template several times for each call
    patch.setattr(FakeEndpointConfig, "validate_instance_type", lambda self, name: None)
    patch.setattr(FakeEndpoint, "cloudformation_name_type", lambda: "EndpointName")

    def answered(found: Any) -> ActionResult:
        if isinstance(found, dict):
            found = {name: value for name, value in found.items() if value != {}}
        return ActionResult(found)

    patch.setattr(responses, "ActionResult", answered)
    # It warns of types that it does not have, in a thread where a warning is an error.
    patch.setattr(parsing, "warnings", SimpleNamespace(warn=lambda *_, **__: None))
    clean = parsing.clean_json

    def clean_json(value: Any, resources: Any) -> Any:
        found = clean(value, resources)
        return [item for item in found if item is not None] if isinstance(found, list) else found

    patch.setattr(parsing, "clean_json", clean_json)
    answer = BaseResponse.call_action

    def call_action(self: BaseResponse) -> Any:
        made.calls.append(self._get_action())
        return answer(self)

    patch.setattr(BaseResponse, "call_action", call_action)
    create = CloudFormationBackend.create_change_set

    def create_change_set(self: Any, **given: Any) -> Any:
        for id, stack in list(self.stacks.items()):
            if (stack.name, stack.status) == (given["stack_name"], "REVIEW_IN_PROGRESS"):
                del self.stacks[id]
        return create(self, **given)

    patch.setattr(CloudFormationBackend, "create_change_set", create_change_set)
    execute = CloudFormationBackend.execute_change_set

    def execute_change_set(self: Any, change_set_name: str, stack_name: str | None = None) -> None:
        stack = self.stacks[self.change_sets[change_set_name].stack_id]
        stack.description = template()["Description"]
        if made.failure:
            stack._add_stack_event("CREATE_FAILED", resource_status_reason=made.failure)
            stack.status, made.failure = "ROLLBACK_COMPLETE", None
            return
        execute(self, change_set_name, stack_name)
        if made.busy:
            stack.status = stack.status.replace("_COMPLETE", "_IN_PROGRESS")

    patch.setattr(CloudFormationBackend, "execute_change_set", execute_change_set)
