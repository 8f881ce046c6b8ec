"""Serve Cloud TPU's queued resources on loopback: states, long-running operations, and faults on demand.

It speaks the REST of `tpu.googleapis.com/v2`, so that Google's own client can be pointed at it. Time is `world.now`,
which a test moves on.
"""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass, field
from urllib.parse import parse_qs, urlsplit

from jobs.cloud.loopback import Loopback, Troubles

REASONS = {400: "FAILED_PRECONDITION", 404: "NOT_FOUND", 409: "ALREADY_EXISTS", 429: "RESOURCE_EXHAUSTED"}


@dataclass
class Story:
    """What becomes of a request, in seconds of the server's clock."""

    creating: float = 1
    waiting: float = 2
    provisioning: float = 1
    deleting: float = 1
    end: str = "none"  # what happens after `active` seconds: preempted, vanished, terminated, suspended; or failed
    active: float = 5
    lag: float = 2  # from a node's end to the queued resource's own SUSPENDED; suspending lasts as long


@dataclass
class Queued:
    name: str
    body: dict
    made: float
    request_id: str
    story: Story
    deleted: float | None = None
    hidden: bool = False  # only its nodes are seen

    @property
    def node_ids(self) -> list[str]:
        (spec,) = self.body["tpu"]["nodeSpec"]
        many = spec.get("multisliceParams")
        return [f"{many['nodeIdPrefix']}-{n}" for n in range(many["nodeCount"])] if many else [spec["nodeId"]]

    def state(self, now: float) -> str:
        if self.deleted is not None:
            return "DELETING" if now < self.deleted + self.story.deleting else "GONE"
        age, story = now - self.made, self.story
        for state, seconds in (("CREATING", story.creating), ("WAITING_FOR_RESOURCES", story.waiting)):
            if age < seconds:
                return state
            age -= seconds
        if story.end == "failed":
            return "FAILED"
        if age < story.provisioning:
            return "PROVISIONING"
        return self._after(age - story.provisioning)

    def _after(self, active: float) -> str:
        story = self.story
        ended = active - story.active
        if story.end == "none" or ended < (0 if story.end == "suspended" else story.lag):
            return "ACTIVE"
        return "SUSPENDING" if ended < 2 * story.lag else "SUSPENDED"

    def node(self, now: float) -> str:
        """A node's state; GONE where there is none."""
        story = self.story
        if self.state(now) not in ("ACTIVE", "SUSPENDING"):
            return "GONE"
        active = now - self.made - story.creating - story.waiting - story.provisioning
        if story.end == "none" or active < story.active:
            return "READY"
        return {"preempted": "PREEMPTED", "terminated": "TERMINATED"}.get(story.end, "GONE")


@dataclass
class World(Troubles):
    """All that the cloud holds, and all that was ever asked of it."""

    queued: dict[str, Queued] = field(default_factory=dict)
    past: list[Queued] = field(default_factory=list)
    operations: dict[str, tuple[str, str]] = field(default_factory=dict)  # name -> (create or delete, of which)
    stories: deque[Story] = field(default_factory=deque)
    forgets_request_ids: bool = True  # a repeated create meets 409; else it is answered as the first was
    busy_while_creating: bool = False  # a delete that comes too early meets 409
    refusal: tuple[int, str] | None = None  # what every create is answered with
    unreachable: list[str] = field(default_factory=list)  # what a list says it could not ask
    endpoint: str = "127.0.0.{}"

    def live(self) -> dict[str, Queued]:
        """What is there now: what has been deleted goes when its time is over."""
        for name, one in list(self.queued.items()):
            if one.state(self.now) == "GONE":
                self.past.append(self.queued.pop(name))
        return self.queued

    def made(self) -> list[Queued]:
        return [*self.past, *self.queued.values()]


class FakeTpu(Loopback):
    def __init__(self, slow: float = 0.3) -> None:
        self.world = World()
        super().__init__(self._act, lambda: self.world, _error, slow)

    def _act(self, method: str, path: str, body: dict) -> tuple[int, dict]:
        url = urlsplit(path)
        query = {key: values[0] for key, values in parse_qs(url.query).items()}
        where = re.fullmatch(r"/v2/(projects/[^/]+/locations/[^/]+)/(\w+)(?:/([\w.-]+))?", url.path)
        if where is None:
            return 404, _error(404, f"no such path {url.path}")
        parent, kind, name = where.groups()
        act = getattr(self, f"_{method.lower()}_{kind}", None)
        return act(f"{parent}/{kind}/{name}" if name else parent, query, body) if act else (404, _error(404, kind))

    # --- queued resources ---------------------------------------------------------------------------------------------

    def _post_queuedResources(self, parent: str, query: dict, body: dict) -> tuple[int, dict]:
        world = self.world
        name = f"{parent}/queuedResources/{query['queuedResourceId']}"
        if world.refusal:
            return world.refusal[0], _error(*world.refusal)
        there = world.live().get(name)
        if there is not None:
            if world.forgets_request_ids or there.request_id != query.get("requestId"):
                return 409, _error(409, f"Resource {name!r} already exists")
            return 200, self._operation("create", name)
        story = world.stories.popleft() if world.stories else Story()
        world.queued[name] = Queued(name, body, world.now, query.get("requestId", ""), story)
        return 200, self._operation("create", name)

    def _get_queuedResources(self, name: str, query: dict, body: dict) -> tuple[int, dict]:
        live = self.world.live()
        if "/queuedResources/" not in name:
            found = [self._shown(one) for title, one in live.items() if title.startswith(name + "/") and not one.hidden]
            return 200, {"queuedResources": found, "unreachable": self.world.unreachable}
        return (200, self._shown(live[name])) if name in live else (404, _error(404, f"{name} not found"))

    def _delete_queuedResources(self, name: str, query: dict, body: dict) -> tuple[int, dict]:
        world = self.world
        one = world.live().get(name)
        if one is None:
            return 404, _error(404, f"{name} not found")
        if one.deleted is not None:
            return 409, _error(409, f"{name} is being deleted")
        if one.state(world.now) == "CREATING" and world.busy_while_creating:
            return 409, _error(409, f"{name}: another operation is under way")
        if query.get("force") != "true" and one.state(world.now) in ("ACTIVE", "PROVISIONING", "SUSPENDING"):
            return 400, _error(400, f"{name} has nodes: delete them first, or use force")
        one.deleted = world.now
        return 200, self._operation("delete", name)

    def _shown(self, one: Queued) -> dict:
        state = {"state": one.state(self.world.now)}
        if state["state"] == "FAILED":
            state["failedData"] = {"error": {"code": 8, "message": "no more capacity in the zone"}}
        return {"name": one.name, "state": state, **one.body}

    # --- nodes and operations -----------------------------------------------------------------------------------------

    def _get_nodes(self, name: str, query: dict, body: dict) -> tuple[int, dict]:
        nodes = {node["name"]: node for one in self.world.live().values() for node in self._nodes(one)}
        if "/nodes/" not in name:
            return 200, {"nodes": [node for n, node in nodes.items() if n.startswith(name + "/")]}
        return (200, nodes[name]) if name in nodes else (404, _error(404, f"{name} not found"))

    def _nodes(self, one: Queued) -> list[dict]:
        state = one.node(self.world.now)
        if state == "GONE":
            return []
        (spec,) = one.body["tpu"]["nodeSpec"]
        hosts = _hosts(spec["node"])
        endpoint = self.world.endpoint
        return [
            {
                **spec["node"],
                "name": f"{spec['parent']}/nodes/{node}",
                "state": state,
                "queuedResource": one.name,
                "networkEndpoints": [
                    {
                        "ipAddress": f"10.0.{j}.{k}",
                        "accessConfig": {"externalIp": endpoint.format(j * hosts + k)},
                    }
                    for k in range(hosts)
                ],
            }
            for j, node in enumerate(one.node_ids)
        ]

    def _get_operations(self, name: str, query: dict, body: dict) -> tuple[int, dict]:
        if name not in self.world.operations:
            return 404, _error(404, f"{name} not found")
        return 200, self._described(name)

    def _operation(self, kind: str, target: str) -> dict:
        world = self.world
        parent = target.rpartition("/queuedResources/")[0]
        name = f"{parent}/operations/operation-{len(world.operations)}"
        world.operations[name] = (kind, target)
        return self._described(name)

    def _described(self, name: str) -> dict:
        world = self.world
        kind, target = world.operations[name]
        one = world.live().get(target)
        done = one is None if kind == "delete" else one is None or one.state(world.now) != "CREATING"
        shown = {"name": name, "done": done}
        if done:
            made = "google.cloud.tpu.v2.QueuedResource" if kind == "create" else "google.protobuf.Empty"
            shown["response"] = {"@type": f"type.googleapis.com/{made}"}
        return shown


def _hosts(node: dict) -> int:
    from dovetail.core.accelerator import parse

    given = node.get("acceleratorType")
    config = node.get("acceleratorConfig", {})
    return parse(given or f"{config['type'].lower().replace('_', '')}:{config['topology']}").hosts


def _error(code: int, message: str) -> dict:
    return {"error": {"code": code, "message": message, "status": REASONS.get(code, "UNAVAILABLE")}}
