"""Serve the part of the Kubernetes API that the backend uses, on loopback.

It checks a JobSet by its schema, deletes in the foreground (a JobSet goes after its pods) and lets a test play the
controller: `run`, `finish` and `preempt` are what JobSet and the nodes would do.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from urllib.parse import parse_qs, urlsplit

import jsonschema
from jobs.cloud.jobset_schema import JOBSET
from jobs.cloud.loopback import Loopback, Troubles

KINDS = {"configmaps": "ConfigMap", "secrets": "Secret", "pods": "Pod", "jobsets": "JobSet"}
PATH = re.compile(r"/(?:api/v1|apis/jobset\.x-k8s\.io/v1alpha2)/namespaces/([\w-]+)/(\w+)(?:/([\w.-]+))?(/log)?")


@dataclass
class World(Troubles):
    held: dict[tuple[str, str, str], dict] = field(default_factory=dict)  # (namespace, kind, name)
    logs: dict[str, bytes] = field(default_factory=dict)  # by pod
    refusal: tuple[int, str] | None = None  # what every create is answered with
    made: list[tuple[str, str]] = field(default_factory=list)  # (kind, name)


class FakeKube(Loopback):
    def __init__(self, slow: float = 0.3) -> None:
        self.world = World()
        super().__init__(self._act, lambda: self.world, _error, slow)

    def _act(self, method: str, path: str, body: dict) -> tuple[int, dict | bytes]:
        url = urlsplit(path)
        where = PATH.fullmatch(url.path)
        if where is None:
            return 404, _error(404, f"no such path {url.path}")
        space, plural, name, log = where.groups()
        kind, held = KINDS[plural], self.world.held
        if log:
            return 200, self.world.logs.get(name, b"")
        if method == "POST":
            return self._create(space, kind, body)
        if name is None:
            wanted = parse_qs(url.query).get("labelSelector", [""])[0]
            return 200, {"kind": f"{kind}List", "items": [one for one in self._all(space, kind) if _fits(one, wanted)]}
        if (space, kind, name) not in held:
            return 404, _error(404, f'{plural} "{name}" not found')
        return (200, held[space, kind, name]) if method == "GET" else self._delete(space, kind, name)

    def _create(self, space: str, kind: str, body: dict) -> tuple[int, dict]:
        name = body["metadata"]["name"]
        if self.world.refusal:
            return self.world.refusal[0], _error(*self.world.refusal)
        if (space, kind, name) in self.world.held:
            return 409, _error(409, f'{kind} "{name}" already exists')
        if kind == "JobSet":
            jsonschema.validate(body, JOBSET)
        self.world.held[space, kind, name] = body
        self.world.made.append((kind, name))
        return 201, body

    def _delete(self, space: str, kind: str, name: str) -> tuple[int, dict]:
        one = self.world.held[space, kind, name]
        if kind == "JobSet" and self.pods(name):
            one["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
        else:
            del self.world.held[space, kind, name]
        return 200, one if kind == "Pod" else {"kind": "Status", "status": "Success"}

    def _all(self, space: str, kind: str) -> list[dict]:
        return [one for (where, what, _), one in self.world.held.items() if (where, what) == (space, kind)]

    # --- what a cluster does by itself --------------------------------------------------------------------------------

    def jobset(self, name: str) -> dict:
        (found,) = [one for (_, kind, title), one in self.world.held.items() if (kind, title) == ("JobSet", name)]
        return found

    def pods(self, name: str) -> list[dict]:
        return [one for (_, kind, title), one in self.world.held.items() if kind == "Pod" and title.startswith(name)]

    def run(self, name: str, attempt: int = 0, phase: str = "Running") -> None:
        """Create all its pods again."""
        found = self.jobset(name)
        self.end_pods(name)
        (replicated,) = found["spec"]["replicatedJobs"]
        for job in range(replicated["replicas"]):
            for index in range(replicated["template"]["spec"]["completions"]):
                self._pod(found, f"{name}-slice-{job}-{index}-{attempt}", job, index, phase)
        ready = replicated["replicas"] if phase == "Running" else 0
        found["status"] = {"restarts": attempt, "replicatedJobsStatus": [{"name": "slice", "ready": ready}]}

    def _pod(self, jobset: dict, title: str, job: int, index: int, phase: str) -> None:
        labels = {
            "jobset.sigs.k8s.io/jobset-name": jobset["metadata"]["name"], "jobset.sigs.k8s.io/job-index": str(job),
            "batch.kubernetes.io/job-completion-index": str(index),
        }  # fmt: skip
        space = jobset["metadata"]["namespace"]
        waits = {"type": "PodScheduled", "status": "False", "message": "0/4 nodes are available"}
        self.world.held[space, "Pod", title] = {
            "metadata": {"name": title, "uid": title, "labels": labels},
            "spec": {"nodeName": f"node-{job}-{index}", "containers": []},
            "status": {"phase": phase, "conditions": [waits] if phase == "Pending" else []},
        }

    def finish(self, name: str, codes: list[int], disrupted: bool = False, message: str = "") -> None:
        """The pods end with these codes, one after the other, and the JobSet with them. `message`: of what failed."""
        for second, (pod, code) in enumerate(zip(self.pods(name), codes, strict=True)):
            ended = {
                "exitCode": code,
                "finishedAt": f"2026-01-01T00:00:{second:02}Z",
                "reason": "Error" if code else "Completed",
                "message": message if code else "",
            }
            pod["status"]["phase"] = "Failed" if code else "Succeeded"
            pod["status"]["containerStatuses"] = [
                {
                    "name": "main",
                    "state": {"terminated": ended},
                    "image": "i",
                    "imageID": "i",
                    "ready": False,
                    "restartCount": 0,
                }
            ]
            if disrupted:
                pod["status"]["conditions"] = [{"type": "DisruptionTarget", "status": "True"}]
        kind = "Failed" if any(codes) else "Completed"
        self.jobset(name)["status"]["conditions"] = [{"type": kind, "status": "True", "message": kind}]

    def end_pods(self, name: str) -> None:
        """They are gone, and so is a JobSet whose deletion waited for them."""
        for key in [key for key in self.world.held if key[1] == "Pod" and key[2].startswith(name)]:
            del self.world.held[key]
        for key, one in list(self.world.held.items()):
            if key[1:] == ("JobSet", name) and one["metadata"].get("deletionTimestamp"):
                del self.world.held[key]


def _fits(one: dict, wanted: str) -> bool:
    key, _, value = wanted.partition("=")
    return not wanted or one["metadata"].get("labels", {}).get(key) == value


def _error(code: int, message: str) -> dict:
    return {"kind": "Status", "status": "Failure", "message": message, "code": code}
