"""A namespace of a Kubernetes cluster through its Python client, with the three answers that matter kept apart: it is
so, there is no such thing, and nobody knows.

DOVETAIL_KUBE_ENDPOINT=http://127.0.0.1:PORT leads it to another server, without credentials.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from dovetail.core.errors import MissingPackageError, UserError
from dovetail.jobs.backends.backend import Unavailable
from dovetail.jobs.backends.jobset import GROUP, PLURAL, VERSION

ENDPOINT = "DOVETAIL_KUBE_ENDPOINT"
AGAIN = (401, 408, 425, 429)  # a login that has run out is renewed


class NoCluster(ValueError):
    """Nothing here says where the cluster is. Of its own kind, for an answer that is not JSON is a ValueError too."""


class Namespace:
    """`ConfigMap`, `Secret` and `JobSet` by their names. `Unavailable` is raised for what may pass, ValueError for what
    will not."""

    def __init__(self, context: str = "", name: str = "default", endpoint: str = "", timeout: float = 30.0) -> None:
        self.context, self.name, self._timeout = context, name, timeout
        self._endpoint = endpoint or os.environ.get(ENDPOINT, "")
        self._made: Any = None

    def connect(self) -> None:
        """ImportError or ValueError where there is no client, or nothing says where the cluster is."""
        with _asked("find the cluster"):
            _ = self._apis

    def create(self, body: dict[str, Any]) -> bool:
        """False where there is one of its name."""
        with _asked(f"create {body['kind']} {body['metadata']['name']}"):
            try:
                self._calls(body["kind"], "create")(body=body, _request_timeout=self._timeout)
            except Exception as error:
                if _status(error) != 409:
                    raise
                return False
        return True

    def get(self, kind: str, name: str) -> dict[str, Any] | None:
        """None: the cluster says that there is none."""
        with _asked(f"read {kind} {name}"):
            try:
                return self._plain(self._calls(kind, "read")(name=name, _request_timeout=self._timeout))
            except Exception as error:
                if _status(error) != 404:
                    raise
        return None

    def list(self, kind: str, labels: str) -> list[dict[str, Any]]:
        with _asked(f"list {kind}s"):
            found = self._calls(kind, "list")(label_selector=labels, _request_timeout=self._timeout)
            return self._plain(found)["items"]

    def delete(self, kind: str, name: str, grace: int | None = None) -> None:
        """With all that it made, which is gone before it is. Done where it is not there. `grace`: seconds for a pod to
        end in, in place of its own."""
        more = {} if grace is None else {"grace_period_seconds": grace}
        with _asked(f"delete {kind} {name}"):
            try:
                delete = self._calls(kind, "delete")
                delete(name=name, propagation_policy="Foreground", _request_timeout=self._timeout, **more)
            except Exception as error:
                if _status(error) != 404:
                    raise

    def log(self, pod: str) -> bytes:
        """All that the cluster still has of it; nothing where the pod is gone or has not begun."""
        with _asked(f"read the log of {pod}"):
            try:
                read = self._apis[0].read_namespaced_pod_log
                answer = read(pod, self.name, _preload_content=False, _request_timeout=self._timeout)
                return answer.data
            except Exception as error:
                if _status(error) not in (400, 404):
                    raise
        return b""

    def _plain(self, found: Any) -> Any:
        return self._apis[2].sanitize_for_serialization(found)

    def _calls(self, kind: str, verb: str) -> Callable[..., Any]:
        core, custom, _ = self._apis
        if kind == "JobSet":
            verb = {"read": "get"}.get(verb, verb)
            call = getattr(custom, f"{verb}_namespaced_custom_object")
            return lambda **more: call(group=GROUP, version=VERSION, namespace=self.name, plural=PLURAL, **more)
        noun = {"ConfigMap": "config_map", "Secret": "secret", "Pod": "pod"}[kind]
        call = getattr(core, f"{verb}_namespaced_{noun}")
        return lambda **more: call(namespace=self.name, **more)

    @property
    def _apis(self) -> tuple[Any, Any, Any]:
        if self._made is None:
            from kubernetes import client

            api = _client(self.context, self._endpoint)
            self._made = client.CoreV1Api(api), client.CustomObjectsApi(api), api
        return self._made


def current_context(endpoint: str = "") -> str:
    """The name of what kubeconfig has chosen now; "" within a cluster."""
    if endpoint or os.environ.get(ENDPOINT):
        return ""
    with _asked("read kubeconfig"):
        from kubernetes import config

        with suppress(config.ConfigException):
            return config.list_kube_config_contexts()[1]["name"]
    return ""


def _client(context: str, endpoint: str) -> Any:
    from kubernetes import client, config

    made = client.Configuration()
    made.retries = False  # type: ignore[assignment]
    if endpoint:
        made.host = endpoint
        return client.ApiClient(made)
    try:
        config.load_kube_config(context=context or None, client_configuration=made)
    except config.ConfigException as error:
        if context:
            raise NoCluster(
                f"kubeconfig has no context {context!r} ({error}): see `kubectl config get-contexts`"
            ) from error
        with suppress(config.ConfigException):  # a pod of the cluster itself
            config.load_incluster_config(client_configuration=made)
            return client.ApiClient(made)
        raise NoCluster("no cluster is known here: run `gcloud container clusters get-credentials NAME`") from error
    return client.ApiClient(made)


def _status(error: Exception) -> int:
    """Of HTTP; 0 where there was no answer."""
    return int(getattr(error, "status", 0) or 0)


@contextmanager
def _asked(what: str) -> Iterator[None]:
    """Whatever goes wrong with a question, told as one of ours."""
    try:
        import kubernetes.client  # noqa: F401
    except ImportError as error:
        raise MissingPackageError(f"backend gke needs kubernetes ({error}): pip install 'dovetail[gke]'") from error
    try:
        yield
    except (NoCluster, ImportError, Unavailable):
        raise
    except Exception as error:
        status, says = _status(error), f"could not {what}: {_line(error)}"
        full = status == 403 and "quota" in says.lower()
        if 400 <= status < 500 and status not in AGAIN and not full:
            raise UserError(says) from error
        # No answer, half an answer, or one that says to come back: what was asked may have been done all the same.
        raise Unavailable(says, elsewhere=full) from error


def _line(error: Exception) -> str:
    """The server's own sentence, which is in the JSON of its answer."""
    with suppress(ValueError, TypeError, KeyError):
        return f"{_status(error)}: {json.loads(getattr(error, 'body', ''))['message']}"[:300]
    return " ".join(str(error).split())[:300]
