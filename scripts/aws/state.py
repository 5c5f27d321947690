"""What of a deployment is there already, and what is to change."""

from __future__ import annotations

from typing import Any

from scripts.aws import deployment, resources
from scripts.aws.account import Account, log_group
from scripts.aws.deployment import Deployment
from scripts.aws.permissions import Role
from scripts.lib.problem import Problem

LOG_DAYS = 30


class State:
    """What of a deployment is there already. Raises `Problem` where the name is somebody else's."""

    def __init__(self, account: Account, wanted: Deployment) -> None:
        self.wanted = wanted
        find = account.find
        self.model = find("sagemaker", "describe_model", ModelName=wanted.model["ModelName"])
        name = wanted.configuration["EndpointConfigName"]
        self.configuration = find("sagemaker", "describe_endpoint_config", EndpointConfigName=name)
        self.endpoint = find("sagemaker", "describe_endpoint", EndpointName=wanted.name)
        self.current: dict[str, Any] = {}  # the configuration that the endpoint has
        if self.endpoint:
            self._check_owner(account)
            config = self.endpoint["EndpointConfigName"]
            self.current = (
                find("sagemaker", "describe_endpoint_config", EndpointConfigName=config) or {}
            )
        self.logs = resources.log_group_owner(account, wanted.name) is not None
        self.target = resources.scaling_target(account, wanted.name)
        self.policy = self._policy(account)
        self._check_conversion()

    def _check_owner(self, account: Account) -> None:
        mine = resources.in_sagemaker(account, "endpoint", self.wanted.name)
        if self.wanted.name not in [resource.name for resource in mine]:
            raise Problem(
                f"there is an endpoint {self.wanted.name} that kogpt2 deploy did not make:"
                " choose another name"
            )

    def _check_conversion(self) -> None:
        variants = self.current.get("ProductionVariants") or [{}]
        if "InstanceType" in variants[0] and "ServerlessConfig" in self.wanted.variant:
            raise Problem(
                "an endpoint with instances cannot become serverless: choose another name, or tear"
                ' it down first (AWS documentation: "Deploy models with Amazon SageMaker'
                ' Serverless Inference")'
            )

    def _policy(self, account: Account) -> dict[str, Any] | None:
        if not self.target:
            return None
        ids = resources.scalable(self.wanted.name)
        found = account.ask("application-autoscaling", "describe_scaling_policies", **ids)
        policies: list[dict[str, Any]] = found["ScalingPolicies"]
        return next((p for p in policies if p["PolicyName"] == deployment.POLICY), None)

    @property
    def status(self) -> str | None:
        return self.endpoint["EndpointStatus"] if self.endpoint else None

    @property
    def has_configuration(self) -> bool:
        name = self.wanted.configuration["EndpointConfigName"]
        return bool(self.endpoint) and self.endpoint["EndpointConfigName"] == name

    @property
    def is_broken(self) -> bool:
        """Whether nothing but a deletion is left to do with the endpoint."""
        return self.status in ("Failed", "UpdateRollbackFailed")

    @property
    def scales(self) -> bool:
        """Whether it scales as wanted."""
        wanted, policy = self.wanted.scaling, self.wanted.policy
        if wanted is None or policy is None or not self.target or not self.policy:
            return wanted is None and not self.target
        limits = all(self.target[key] == wanted[key] for key in ("MinCapacity", "MaxCapacity"))
        key = "TargetTrackingScalingPolicyConfiguration"
        return limits and self.policy[key] == policy[key]

    def changes(self, role: Role) -> list[tuple[str, str]]:
        """(keep, make, update, ...) and what, in the order in which it happens."""
        wanted = self.wanted
        word = {True: "keep", False: "make"}
        container, variant = wanted.model["PrimaryContainer"], wanted.variant
        source = container.get("ModelDataUrl", "no artifact")
        size = variant.get("ServerlessConfig") or (
            f"{variant['InitialInstanceCount']} x {variant['InstanceType']}"
        )
        if self.is_broken:
            endpoint = ("replace", f"endpoint {wanted.name}, which is {self.status}")
        elif self.endpoint is None:
            endpoint = ("make", f"endpoint {wanted.name}")
        elif self.status in resources.BUSY:
            endpoint = ("await", f"endpoint {wanted.name}, which is {self.status}")
        else:
            endpoint = ("keep" if self.has_configuration else "update", f"endpoint {wanted.name}")
        lines = [
            (role.change, f"role {role.name}"),
            (word[self.logs], f"log group {log_group(wanted.name)}, {LOG_DAYS} days"),
            (word[bool(self.model)], f"model {wanted.model['ModelName']}: {source}"),
            (word[bool(self.configuration)],
             f"configuration {wanted.configuration['EndpointConfigName']}: {size}"),
            endpoint,
        ]  # fmt: skip
        if wanted.scaling:
            between = (
                f"{wanted.scaling['MinCapacity']} to {wanted.scaling['MaxCapacity']} instances"
            )
            lines.append(("keep" if self.scales else "make", f"auto-scaling, {between}"))
        elif self.target:
            lines.append(("remove", "auto-scaling"))
        return lines
