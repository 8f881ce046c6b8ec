"""TPU slices of Google Cloud as queued resources: asked for, watched, their programs run over ssh, given back.

A queued resource ends in SUSPENDED or FAILED and is never granted again; both count against the quota until deleted.
Hosts of a slice cannot be chosen, so `attempt.exclude` is not asked of the service: a new slice is other hosts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dovetail.core.errors import UserError
from dovetail.jobs import secrets
from dovetail.jobs.attempt import PREFIX, Attempt, Resource
from dovetail.jobs.backends import tpu_request, tpu_ssh, tpu_worker
from dovetail.jobs.backends.backend import LogPart, Observed, Unavailable, unasked
from dovetail.jobs.backends.log_file import read
from dovetail.jobs.backends.places import Places
from dovetail.jobs.backends.queued_resources import QueuedResources
from dovetail.jobs.backends.tpu_program import Program
from dovetail.jobs.backends.tpu_ssh import Run, Ssh, Worker
from dovetail.jobs.spec import Spec

WAITING = ("CREATING", "ACCEPTED", "WAITING_FOR_RESOURCES", "PROVISIONING")
NO_ROOM = ("capacity", "stockout", "exhausted", "deadline", "expired", "valid until", "quota")  # words of a FAILED
NODE_WAITING = ("CREATING", "STARTING")
NODE_TAKEN = ("PREEMPTED", "TERMINATED", "STOPPED", "STOPPING", "DELETING", "HIDING", "HIDDEN")
REFUSED = ("INVALID_ARGUMENT", "PERMISSION_DENIED", "unrecognized arguments")  # of gcloud
CREATE_S = 120.0  # for gcloud


class GcpTpu:
    """`root`: the home of jobs. `ssh` and `run` stand in for the real ones in tests."""

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

    # --- asking and giving back ---------------------------------------------------------------------------------------

    def check(self, spec: Spec) -> None:
        tpu_worker.check(spec)
        for name in (spec.accelerator, *spec.others):
            for zone in spec.zones or ("",):
                tpu_request.check(Attempt("job", 1, replace(spec, accelerator=name), Path(), self._owner, zone))
        if self._ssh is None:
            tpu_ssh.check("ssh" if spec.gcp.ssh_user and spec.tier != "flex-start" else "gcloud")
        self._service.connect()

    def create(self, attempt: Attempt) -> str:
        """The handle is the operation that makes it; or its own name, where it was there already."""
        with unasked():
            self.check(attempt.spec)
            secrets.read(attempt.home, attempt.spec)  # they are needed once the slice is there, and paid for
            body, parent = tpu_request.resource(attempt), tpu_request.parent(attempt)
        self._places.add(tpu_request.project_of(attempt.spec), attempt.zone)
        if attempt.spec.tier == "flex-start":
            return self._create_by_gcloud(attempt)
        made = self._service.create(parent, attempt.name, body, tpu_request.request_id(attempt))
        return made or self._adopt(attempt)

    def _adopt(self, attempt: Attempt) -> str:
        """There is one of the name already: by an earlier call of ours, whose answer was lost, or somebody else's."""
        name = _full(attempt)
        there = self._service.get(name)
        if there is not None and not self._is_ours(_labels(there)):
            raise UserError(f"{name} is there and carries another owner's label: it is not ours to use")
        return name

    def _create_by_gcloud(self, attempt: Attempt) -> str:
        done = self._run(tpu_request.flex_start(attempt), b"", CREATE_S)
        if done.code == 0:
            return _full(attempt)
        says = done.err[-300:]
        if "ALREADY_EXISTS" in done.err or "already exists" in done.err:
            return self._adopt(attempt)
        if done.code != 255 and any(word in done.err for word in REFUSED):
            raise UserError(f"gcloud refused the flex-start request: {says}")
        full = any(word in done.err.lower() for word in NO_ROOM)
        raise Unavailable(f"gcloud could not ask for {attempt.name}: {says}", elsewhere=full)

    def delete(self, resource: Resource) -> None:
        """Only what carries our label: a name alone may be somebody else's."""
        if "/nodes/" in resource.handle:
            self._service.delete_node(resource.handle)
            return
        for project in self._projects(resource):
            name = f"projects/{project}/locations/{resource.zone}/queuedResources/{resource.name}"
            there = self._service.get(name)
            if there is not None and self._is_ours(_labels(there)) and there.state.state.name != "DELETING":
                self._service.delete(name)

    def _projects(self, resource: Resource) -> list[str]:
        """The one that the handle names; without one (the create's answer was lost) all that were asked in its zone."""
        if resource.handle.startswith("projects/"):
            return [resource.handle.split("/")[1]]
        return [project for project, zone in self._places.all() if zone == resource.zone]

    def list(self) -> Sequence[Resource]:
        """Queued resources of ours, and nodes of ours whose queued resource is gone."""
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

    # --- watching -----------------------------------------------------------------------------------------------------

    def observe(self, attempt: Attempt) -> Observed:
        try:
            queued = self._service.get(_full(attempt))
            if queued is None or not self._is_ours(_labels(queued)):
                return self._not_there(attempt)
            return self._stands(attempt, queued)
        except (Unavailable, ValueError, ImportError, OSError) as error:
            return Observed("unknown", str(error))

    def _not_there(self, attempt: Attempt) -> Observed:
        """A create that was granted may take a moment to show; one that failed never will."""
        operation = self._service.operation(attempt.handle) if "/operations/" in attempt.handle else None
        if operation is None:
            return Observed("absent", "there is no such queued resource")
        if not operation.done:
            return Observed("waiting", "being made")
        failed = operation.HasField("error")
        return Observed("absent", f"could not be made: {operation.error.message}" if failed else "it is gone")

    def _stands(self, attempt: Attempt, queued: Any) -> Observed:
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
            no_room = any(word in why.lower() for word in NO_ROOM)
            return Observed("suspended" if no_room else "failed", f"FAILED: {why}" if why else state)
        return Observed("unknown", f"the service says {state}")

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
        return Program(attempt, _workers(attempt, nodes), self._how(attempt), self._run).observe()

    def _nodes(self, attempt: Attempt) -> dict[str, Any]:
        """By slice; None for one that both ways of asking say is not there."""
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
        """A slice that was not granted yet has nothing to save: the request for it is taken back."""
        queued = self._service.get(_full(attempt))
        if queued is not None and self._is_ours(_labels(queued)) and queued.state.state.name in WAITING:
            self._service.delete(queued.name)
            return
        program = self._program(attempt)
        if program is not None:
            program.stop(grace)

    def logs(self, attempt: Attempt, rank: int, since: int = 0) -> LogPart:
        """What was brought here is told even when the slice is gone or does not answer."""
        try:
            program = self._program(attempt)
        except (Unavailable, ValueError):
            program = None
        return program.logs(rank, since) if program else read(attempt.log(rank), since)

    def command(self, attempt: Attempt, rank: int) -> list[str]:
        workers = {worker.rank: worker for worker in _workers(attempt, self._ready(attempt))}
        if rank not in workers:
            raise UserError(f"{attempt.name} has no rank {rank} to open a shell on: it has {len(workers)} hosts now")
        return self._how(attempt)(workers[rank], None)

    def _program(self, attempt: Attempt) -> Program | None:
        nodes = self._ready(attempt)
        return Program(attempt, _workers(attempt, nodes), self._how(attempt), self._run) if nodes else None

    def _ready(self, attempt: Attempt) -> dict[str, Any]:
        """The nodes, if all are there."""
        queued = self._service.get(_full(attempt))
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


def _workers(attempt: Attempt, nodes: dict[str, Any]) -> list[Worker]:
    """By rank: the hosts of slice 0, then those of slice 1."""
    hosts = attempt.spec.device.hosts
    return [
        Worker(j * hosts + k, name, k, _address(node, k))
        for j, (name, node) in enumerate(nodes.items())
        for k in range(hosts)
    ]


def _address(node: Any, index: int) -> str:
    endpoints = list(node.network_endpoints)
    if index >= len(endpoints):
        return ""
    return endpoints[index].access_config.external_ip or endpoints[index].ip_address


def _full(attempt: Attempt) -> str:
    return f"{tpu_request.parent(attempt)}/queuedResources/{attempt.name}"


def _labels(queued: Any) -> dict[str, str]:
    specs = list(queued.tpu.node_spec)
    return dict(specs[0].node.labels) if specs else {}


def _attempt_of(node: Any) -> str:
    """The name of the attempt that a node was made for, by its labels: one of several slices has a longer one."""
    return f"{PREFIX}-{node.labels.get(tpu_request.JOB, '')}-{node.labels.get(tpu_request.NUMBER, '')}"


def _last(name: str) -> str:
    return name.rpartition("/")[2]
