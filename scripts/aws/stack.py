"""A CloudFormation stack: planning a change, making it, and printing its events."""

from __future__ import annotations

import contextlib
import time
from typing import Any

from command.errors import Problem
from scripts.aws.account import Account

FIRST_POLL_S, LONGEST_POLL_S = 0.2, 5.0
DONE = ("CREATE_COMPLETE", "UPDATE_COMPLETE", "DELETE_COMPLETE", "REVIEW_IN_PROGRESS")
STUCK = ("ROLLBACK_COMPLETE", "ROLLBACK_FAILED", "DELETE_FAILED", "CREATE_FAILED")


def is_busy(stack: dict[str, Any]) -> bool:
    return bool(stack["StackStatus"].endswith("_IN_PROGRESS") and stack["StackStatus"] not in DONE)


class Stack:
    """A CloudFormation stack; `description` is AWS's, None if the stack does not exist."""

    def __init__(self, account: Account, name: str) -> None:
        self.name = name
        self._account, self._client = account, account.client("cloudformation")
        self.description: dict[str, Any] | None = self._describe(name)

    def _describe(self, name: str) -> dict[str, Any] | None:
        result = self._account.find("cloudformation", "describe_stacks", StackName=name)
        return result["Stacks"][0] if result else None

    @property
    def is_new(self) -> bool:
        """Whether no resource of the stack has been created."""
        return self.description is None or self.description["StackStatus"] == "REVIEW_IN_PROGRESS"

    @property
    def values(self) -> dict[str, str]:
        """The values of the stack's parameters, by name."""
        result = (self.description or {}).get("Parameters", [])
        return {item["ParameterKey"]: item["ParameterValue"] for item in result}

    def plan(
        self, body: str, values: dict[str, str], tags: dict[str, str]
    ) -> dict[str, Any] | None:
        """Create a change set; None if nothing changes. Raises `Problem` with AWS's reason."""
        from botocore.exceptions import WaiterError

        status = (self.description or {}).get("StackStatus")
        if status in STUCK:
            raise Problem(f"stack {self.name} is {status}: kogpt2 teardown {self.name} removes it")
        made = self._client.create_change_set(
            StackName=self.name,
            ChangeSetName=f"kogpt2-{time.time_ns()}",
            ChangeSetType="CREATE" if self.is_new else "UPDATE",
            TemplateBody=body,
            Parameters=[{"ParameterKey": k, "ParameterValue": v} for k, v in values.items()],
            Tags=[{"Key": key, "Value": value} for key, value in tags.items()],
            Capabilities=["CAPABILITY_IAM"],
            **({"OnStackFailure": "DELETE"} if self.is_new else {}),
        )
        with contextlib.suppress(WaiterError):  # raised for a failed change set, too
            self._client.get_waiter("change_set_create_complete").wait(
                ChangeSetName=made["Id"], WaiterConfig={"Delay": 1, "MaxAttempts": 600}
            )
        plan: dict[str, Any] = self._client.describe_change_set(ChangeSetName=made["Id"])
        if plan["Status"] != "FAILED":
            return plan
        self.drop(plan)
        reason = plan.get("StatusReason", "")
        if "didn't contain changes" in reason or "No updates" in reason:
            return None
        raise Problem(f"CloudFormation refuses the change: {reason}")

    def drop(self, plan: dict[str, Any]) -> None:
        """Delete a change set.

        A new stack stays as CloudFormation made it for the change set: without resources, until
        the next deployment or `kogpt2 teardown`. Deleting it could delete an endpoint that another
        terminal has created in it since.
        """
        # Executing another change set of the stack has deleted this one.
        self._account.find("cloudformation", "delete_change_set", ChangeSetName=plan["ChangeSetId"])

    def wait_for_others(self) -> None:
        """Wait for the end of a change that was started before."""
        if self.description and not self.is_new and is_busy(self.description):
            self.settle(since=self._events()[0]["Timestamp"])

    def carry_out(self, plan: dict[str, Any]) -> None:
        self._client.execute_change_set(ChangeSetName=plan["ChangeSetId"])
        self.description = self._describe(plan["StackId"])
        self.settle(since=plan["CreationTime"])

    def delete(self) -> None:
        """Delete the stack. Raises `Problem` with the first reason of a failure."""
        since = self._events()[0]["Timestamp"]
        self._client.delete_stack(StackName=self.name)
        self.settle(since)

    def _events(self) -> list[dict[str, Any]]:
        """List the events, newest first."""
        assert self.description is not None
        name = self.description["StackId"]
        result = self._account.find("cloudformation", "describe_stack_events", StackName=name)
        return result["StackEvents"] if result else []

    def settle(self, since: Any) -> None:
        """Wait and print events. Raises `Problem` with the first reason of a failure."""
        assert self.description is not None
        name, poll_s, reasons = self.description["StackId"], FIRST_POLL_S, list[str]()
        seen: set[str] = set()
        while True:
            now = self._describe(name)
            status = now["StackStatus"] if now else "DELETE_COMPLETE"
            for event in reversed(self._events()):
                if event["EventId"] in seen or event["Timestamp"] < since:
                    continue
                seen.add(event["EventId"])
                what, reason = event["ResourceStatus"], event.get("ResourceStatusReason", "")
                print(
                    f"  {event['Timestamp']:%H:%M:%S} {what:<20} {event['LogicalResourceId']}",
                    flush=True,
                )
                if what.endswith("FAILED") and "cancelled" not in reason:
                    reasons.append(f"{event['LogicalResourceId']}: {reason}")
            if not (now and is_busy(now)):
                break
            time.sleep(poll_s)
            poll_s = min(LONGEST_POLL_S, poll_s * 1.5)
        self.description = now
        if reasons or status not in DONE:
            raise Problem("; ".join([f"stack {self.name} is {status}", *reasons[:1]]))
