"""Brings a deployment from the state it is in to the one that is wanted."""

from __future__ import annotations

import time
from typing import Any

from scripts.aws import permissions, resources
from scripts.aws.account import Account, key_values, log_group
from scripts.aws.deployment import Deployment
from scripts.aws.permissions import Role
from scripts.aws.report import phase, wait
from scripts.aws.state import LOG_DAYS, State
from scripts.lib.problem import Problem

LIMIT_S = 3600.0
ROLE_LIMIT_S = 60.0  # IAM tells its other servers of a new role within seconds


class Steps:
    """Does what `State` says is missing, a phase each."""

    def __init__(self, account: Account, wanted: Deployment, state: State) -> None:
        self.account, self.wanted, self.state = account, wanted, state
        self.tags = key_values(wanted.tags)

    def all(self, role: Role) -> None:
        self.role(role)
        self.logs()
        self.model(role.change == "make")
        self.configuration()
        self.endpoint()
        self.scaling()

    def role(self, role: Role) -> None:
        if role.change == "keep":
            return
        with phase("role", self.account.dry_run) as step:
            permissions.grant(self.account, role, self.wanted.tags)
            step.result = f"{role.name} may do {permissions.count(role.needed)} things"

    def logs(self) -> None:
        """Made here because SageMaker's own would have no tag and would be kept for ever."""
        if self.state.logs:
            return
        with phase("log group", self.account.dry_run) as step:
            name = log_group(self.wanted.name)
            self.account.do("logs", "create_log_group", logGroupName=name, tags=self.wanted.tags)
            self.account.do(
                "logs", "put_retention_policy", logGroupName=name, retentionInDays=LOG_DAYS
            )
            step.result = f"{name} made"

    def model(self, role_is_new: bool) -> None:
        with phase("model", self.account.dry_run) as step:
            step.result = f"{self.wanted.model['ModelName']} is there"
            if not self.state.model:
                step.result = f"{self.wanted.model['ModelName']} made"
                self._create_model(ROLE_LIMIT_S if role_is_new else 0)

    def _create_model(self, patience_s: float) -> None:
        from botocore.exceptions import ClientError

        end = time.monotonic() + patience_s
        while True:
            try:
                self.account.do("sagemaker", "create_model", **self.wanted.model, Tags=self.tags)
                return
            except ClientError as error:
                told = error.response["Error"]["Message"].lower()
                if time.monotonic() > end or "role" not in told:
                    raise
            time.sleep(3)

    def configuration(self) -> None:
        with phase("configuration", self.account.dry_run) as step:
            step.result = f"{self.wanted.configuration['EndpointConfigName']} is there"
            if not self.state.configuration:
                step.result = f"{self.wanted.configuration['EndpointConfigName']} made"
                self.account.do(
                    "sagemaker",
                    "create_endpoint_config",
                    **self.wanted.configuration,
                    Tags=self.tags,
                )

    def endpoint(self) -> None:
        name, config = self.wanted.name, self.wanted.configuration["EndpointConfigName"]
        do, state = self.account.do, self.state
        with phase("endpoint", self.account.dry_run) as step:
            if state.status in resources.BUSY and not self.account.dry_run:
                self._settled()
                state = State(self.account, self.wanted)
            if state.is_broken:
                do("sagemaker", "delete_endpoint", EndpointName=name)
                if not self.account.dry_run:
                    wait(f"endpoint {name}", self._status, resources.BUSY, LIMIT_S)
            if state.endpoint is None or state.is_broken:
                do("sagemaker", "create_endpoint", EndpointName=name, EndpointConfigName=config,
                   Tags=self.tags)  # fmt: skip
                step.result = f"{name} made"
            elif not state.has_configuration:
                self._update(state)
                step.result = f"{name} updated"
            else:
                step.result = f"{name} is as wanted"
            if not self.account.dry_run:
                self._settled()
                if self.account.ask("sagemaker", "describe_endpoint", EndpointName=name)[
                    "EndpointConfigName"
                ] != config:  # fmt: skip
                    raise Problem(f"SageMaker rolled the update of {name} back: kogpt2 logs {name}")

    def _update(self, state: State) -> None:
        """An auto-scaled endpoint keeps its number of instances; AWS wants the target gone first
        where the type of its instances changes."""
        name, config = self.wanted.name, self.wanted.configuration["EndpointConfigName"]
        keep: dict[str, Any] = {}
        if state.target:
            variants = state.current.get("ProductionVariants") or [{}]
            if (
                self.wanted.scaling
                and variants[0].get("InstanceType") == self.wanted.variant.get("InstanceType")
            ):  # fmt: skip
                keep = {
                    "RetainAllVariantProperties": True,
                    "ExcludeRetainedVariantProperties": [
                        {"VariantPropertyType": "DataCaptureConfig"}
                    ],
                }
            else:
                self._deregister()
        self.account.do(
            "sagemaker", "update_endpoint", EndpointName=name, EndpointConfigName=config, **keep
        )

    def _deregister(self) -> None:
        ids = resources.scalable(self.wanted.name)
        self.account.do("application-autoscaling", "deregister_scalable_target", **ids)
        self.state.target = None

    def _status(self) -> str:
        found = self.account.find("sagemaker", "describe_endpoint", EndpointName=self.wanted.name)
        return found["EndpointStatus"] if found else "gone"

    def _settled(self) -> None:
        """Waits. Raises `Problem` with SageMaker's reason where it failed."""
        name = self.wanted.name
        if wait(f"endpoint {name}", self._status, resources.BUSY, LIMIT_S) == "InService":
            return
        found = self.account.ask("sagemaker", "describe_endpoint", EndpointName=name)
        reason = found.get("FailureReason", "SageMaker gave no reason")
        raise Problem(
            f"endpoint {name} is {found['EndpointStatus']}: {reason}; kogpt2 logs {name} has more"
        )

    def scaling(self) -> None:
        wanted, policy = self.wanted.scaling, self.wanted.policy
        if wanted is None and self.state.target is None:
            return
        with phase("auto-scaling", self.account.dry_run) as step:
            if wanted is None or policy is None:
                self._deregister()
                step.result = "removed"
                return
            if self.state.scales:
                step.result = "is as wanted"
                return
            tags = self.wanted.tags
            self.account.do("application-autoscaling", "register_scalable_target", **wanted,
                            **({} if self.state.target else {"Tags": tags}))  # fmt: skip
            self.account.do("application-autoscaling", "put_scaling_policy", **policy)
            step.result = f"{wanted['MinCapacity']} to {wanted['MaxCapacity']} instances"
