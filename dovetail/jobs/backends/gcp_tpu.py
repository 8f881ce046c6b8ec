"""TPU slices of Google Cloud as queued resources: requested, observed, their programs run over ssh, deleted.

A queued resource ends in SUSPENDED or FAILED and is never granted again; both count against the quota until deleted.
Hosts of a slice cannot be chosen, so `attempt.exclude` is not used: a new slice has other hosts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dovetail.core.errors import UserError
from dovetail.jobs import secrets
from dovetail.jobs.backends import tpu_program, tpu_request, tpu_ssh
from dovetail.jobs.backends.backend import LogPart, Observed, Places, UnavailableError, before_request, read_log
from dovetail.jobs.backends.queued_resources import QueuedResources
from dovetail.jobs.backends.tpu_program import TpuProgram
from dovetail.jobs.backends.tpu_ssh import Run, Ssh, TpuHost
from dovetail.jobs.job import PREFIX, Attempt, Resource
from dovetail.jobs.spec import Spec

WAITING = ("CREATING", "ACCEPTED", "WAITING_FOR_RESOURCES", "PROVISIONING")
NO_CAPACITY = ("capacity", "stockout", "exhausted", "deadline", "expired", "valid until", "quota")  # words of a FAILED
NODE_WAITING = ("CREATING", "STARTING")
NODE_TAKEN = ("PREEMPTED", "TERMINATED", "STOPPED", "STOPPING", "DELETING", "HIDING", "HIDDEN")
REFUSED = ("INVALID_ARGUMENT", "PERMISSION_DENIED", "unrecognized arguments")  # by gcloud
CREATE_S = 120.0  # for gcloud


class GcpTpuBackend:
    """Run jobs on Cloud TPU VMs. `service`, `ssh` and `run` are replaced in tests."""

    def __init__(
        self,
        root: Path,
        owner: str,
        service: QueuedResources | None = None,
        ssh: Ssh | None = None,
        run: Run = tpu_ssh.run,
    ) -> None:
        self._owner, self._places = owner, Places(root, "gcp-tpu")  # (project, zone)
        self._service = service or QueuedResources()
        self._ssh, self._run = ssh, run

    # --- creating and deleting ----------------------------------------------------------------------------------------

    def check(self, spec: Spec) -> None:
        """Raise UserError for a spec that can never start here."""
        tpu_program.check(spec)
        for name in (spec.accelerator, *spec.others):
            for zone in spec.zones or ("",):
                tpu_request.check(Attempt("job", 1, replace(spec, accelerator=name), Path(), self._owner, zone))
        if self._ssh is None:
            tpu_ssh.check("ssh" if spec.gcp.ssh_user and spec.tier != "flex-start" else "gcloud")
        self._service.connect()

    def create(self, attempt: Attempt) -> str:
        """Request the slices; return the operation that creates them, or the full name if they exist."""
        with before_request():
            self.check(attempt.spec)
            secrets.read(attempt.home, attempt.spec)  # check them before the slice is paid for
            body, parent = tpu_request.resource(attempt), tpu_request.parent(attempt)
        self._places.add(tpu_request.project_of(attempt.spec), attempt.zone)
        if attempt.spec.tier == "flex-start":
            return self._create_by_gcloud(attempt)
        made = self._service.create(parent, attempt.name, body, tpu_request.request_id(attempt))
        return made or self._adopt(attempt)

    def _adopt(self, attempt: Attempt) -> str:
        """Use an existing resource of this name if an earlier call of ours made it."""
        name = _full_name(attempt)
        there = self._service.get(name)
        if there is not None and not self._is_ours(_labels(there)):
            raise UserError(f"{name} exists with another owner's label, so it is not used", code="not_ours")
        return name

    def _create_by_gcloud(self, attempt: Attempt) -> str:
        done = self._run(tpu_request.flex_start(attempt), b"", CREATE_S)
        if done.code == 0:
            return _full_name(attempt)
        says = done.err[-300:]
        if "ALREADY_EXISTS" in done.err or "already exists" in done.err:
            return self._adopt(attempt)
        if done.code != 255 and any(word in done.err for word in REFUSED):
            raise UserError(f"gcloud refused the flex-start request: {says}", code="cloud_refused")
        full = any(word in done.err.lower() for word in NO_CAPACITY)
        raise UnavailableError(f"gcloud could not request {attempt.name}: {says}", elsewhere=full)

    def delete(self, resource: Resource) -> None:
        """Delete a resource with our label: a name alone may be another owner's."""
        if "/nodes/" in resource.handle:
            self._service.delete_node(resource.handle)
            return
        for project in self._projects(resource):
            name = f"projects/{project}/locations/{resource.zone}/queuedResources/{resource.name}"
            there = self._service.get(name)
            if there is not None and self._is_ours(_labels(there)) and there.state.state.name != "DELETING":
                self._service.delete(name)

    def _projects(self, resource: Resource) -> list[str]:
        """Return the project of the handle; without one (the answer was lost) all projects used in its zone."""
        if resource.handle.startswith("projects/"):
            return [resource.handle.split("/")[1]]
        return [project for project, zone in self._places.all() if zone == resource.zone]

    def list(self) -> Sequence[Resource]:
        """Return our queued resources, and our nodes whose queued resource is gone."""
        found = []
        for project, zone in self._places.all():
            parent = f"projects/{project}/locations/{zone}"
            queued = self._service.list(parent)
            found += [Resource(_last(one.name), zone, one.name) for one in queued if self._is_ours(_labels(one))]
            names = {_last(one.name) for one in queued}  # the project before it may be written as a number
            for node in self._service.nodes(parent):
                if self._is_ours(node.labels) and _last(node.queued_resource) not in names:
                    found.append(Resource(_attempt_of(node), zone, node.name))
        return found

    def _is_ours(self, labels: Any) -> bool:
        return labels.get(tpu_request.OWNER) == self._owner

    # --- observing ----------------------------------------------------------------------------------------------------

    def observe(self, attempt: Attempt) -> Observed:
        """Return the state of an attempt; start its program once the slices are ready."""
        try:
            queued = self._service.get(_full_name(attempt))
            if queued is None or not self._is_ours(_labels(queued)):
                return self._missing(attempt)
            return self._observed(attempt, queued)
        except (UserError, OSError) as error:
            return Observed("unknown", str(error))

    def _missing(self, attempt: Attempt) -> Observed:
        """Return the state of the operation: a new resource may appear after a moment."""
        operation = self._service.operation(attempt.handle) if "/operations/" in attempt.handle else None
        if operation is None:
            return Observed("absent", "there is no such queued resource")
        if not operation.done:
            return Observed("waiting", "being created")
        failed = operation.HasField("error")
        return Observed("absent", f"could not be created: {operation.error.message}" if failed else "it is gone")

    def _observed(self, attempt: Attempt, queued: Any) -> Observed:
        state = queued.state.state.name
        if state in WAITING:
            return Observed("waiting", state)
        if state == "ACTIVE":
            return self._active(attempt)
        if state in ("SUSPENDING", "SUSPENDED"):
            return Observed("suspended", state)
        if state == "DELETING":
            return Observed("preempted", "it is being deleted")
        if state == "FAILED":
            why = queued.state.failed_data.error.message
            no_capacity = any(word in why.lower() for word in NO_CAPACITY)
            return Observed("suspended" if no_capacity else "failed", f"FAILED: {why}" if why else state)
        return Observed("unknown", f"the service reports {state}")

    def _active(self, attempt: Attempt) -> Observed:
        nodes = self._nodes(attempt)
        for name, node in nodes.items():
            state = node.state.name if node is not None else "gone"
            if node is None or state in NODE_TAKEN:
                return Observed("preempted", f"node {_last(name)} is {state}")
            if state in NODE_WAITING:
                return Observed("waiting", f"node {_last(name)} is {state}")
            if state != "READY":
                return Observed("unknown", f"node {_last(name)} is {state}")
        return self._program_of(attempt, nodes).observe()

    def _nodes(self, attempt: Attempt) -> dict[str, Any]:
        """Return the node of each slice; None for one that neither `get` nor `list` shows."""
        parent = tpu_request.parent(attempt)
        found = {
            f"{parent}/nodes/{id}": self._service.node(f"{parent}/nodes/{id}") for id in tpu_request.node_ids(attempt)
        }
        if None in found.values():
            listed = {node.name: node for node in self._service.nodes(parent)}
            found = {name: node or listed.get(name) for name, node in found.items()}
        return found

    # --- the program --------------------------------------------------------------------------------------------------

    def stop(self, attempt: Attempt, grace: float) -> None:
        """Stop the program; delete a request that was not granted yet, because it has nothing to save."""
        queued = self._service.get(_full_name(attempt))
        if queued is not None and self._is_ours(_labels(queued)) and queued.state.state.name in WAITING:
            self._service.delete(queued.name)
            return
        program = self._program(attempt)
        if program is not None:
            program.stop(grace)

    def logs(self, attempt: Attempt, rank: int, since: int = 0) -> LogPart:
        """Return a part of a rank's log; of the copy on this machine if the slice is gone or does not answer."""
        try:
            program = self._program(attempt)
        except UserError:
            program = None
        return program.logs(rank, since) if program else read_log(attempt.log(rank), since)

    def command(self, attempt: Attempt, rank: int) -> list[str]:
        """Return an ssh command that opens a shell on the host of a rank."""
        hosts = {host.rank: host for host in _hosts(attempt, self._ready(attempt))}
        if rank not in hosts:
            raise UserError(
                f"{attempt.name} has no rank {rank} to open a shell on: it has {len(hosts)} hosts now", param="--rank"
            )
        return self._how(attempt)(hosts[rank], None)

    def _program(self, attempt: Attempt) -> TpuProgram | None:
        nodes = self._ready(attempt)
        return self._program_of(attempt, nodes) if nodes else None

    def _program_of(self, attempt: Attempt, nodes: dict[str, Any]) -> TpuProgram:
        return TpuProgram(attempt, _hosts(attempt, nodes), self._how(attempt), self._run)

    def _ready(self, attempt: Attempt) -> dict[str, Any]:
        """Return the nodes if all are ready, else {}."""
        queued = self._service.get(_full_name(attempt))
        if queued is None or queued.state.state.name != "ACTIVE":
            return {}
        nodes = self._nodes(attempt)
        return nodes if all(node is not None and node.state.name == "READY" for node in nodes.values()) else {}

    def _how(self, attempt: Attempt) -> Ssh:
        gcp = attempt.spec.gcp
        if self._ssh is not None:
            return self._ssh
        known = attempt.folder.resolve() / "known_hosts"
        return tpu_ssh.plain(known, gcp.ssh_user) if gcp.ssh_user else tpu_ssh.gcloud(not gcp.external_ips)


def _hosts(attempt: Attempt, nodes: dict[str, Any]) -> list[TpuHost]:
    """Return the hosts by rank: those of slice 0, then those of slice 1."""
    count = attempt.spec.device.hosts
    return [
        TpuHost(j * count + k, name, k, _address(node, k))
        for j, (name, node) in enumerate(nodes.items())
        for k in range(count)
    ]


def _address(node: Any, index: int) -> str:
    endpoints = list(node.network_endpoints)
    if index >= len(endpoints):
        return ""
    return endpoints[index].access_config.external_ip or endpoints[index].ip_address


def _full_name(attempt: Attempt) -> str:
    return f"{tpu_request.parent(attempt)}/queuedResources/{attempt.name}"


def _labels(queued: Any) -> dict[str, str]:
    specs = list(queued.tpu.node_spec)
    return dict(specs[0].node.labels) if specs else {}


def _attempt_of(node: Any) -> str:
    """Return the name of a node's attempt by its labels: with several slices the node's own name is longer."""
    return f"{PREFIX}-{node.labels.get(tpu_request.JOB, '')}-{node.labels.get(tpu_request.NUMBER, '')}"


def _last(name: str) -> str:
    return name.rpartition("/")[2]
