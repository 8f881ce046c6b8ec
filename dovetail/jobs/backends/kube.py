"""A namespace of a Kubernetes cluster, with three distinct answers: a value, no such object, and not known.

DOVETAIL_KUBE_ENDPOINT=http://127.0.0.1:PORT selects another server, without credentials.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from dovetail.core.errors import MissingPackageError, UserError
from dovetail.jobs.backends.backend import UnavailableError
from dovetail.jobs.backends.jobset import GROUP, PLURAL, VERSION

ENDPOINT = "DOVETAIL_KUBE_ENDPOINT"
AGAIN = (401, 408, 425, 429)  # 401: an expired login is renewed


class NoClusterError(UserError):
    """Report that no configuration names a cluster."""

    def __init__(self, message: str) -> None:
        super().__init__(message, param="gke.context", code="no_cluster")


class KubeNamespace:
    """Objects of the kinds ConfigMap, Secret, JobSet and Pod, by name.

    Calls raise UnavailableError if a later call may succeed, and another UserError if it will not.
    """

    def __init__(self, context: str = "", name: str = "default", endpoint: str = "", timeout: float = 30.0) -> None:
        self.context, self.name, self._timeout = context, name, timeout
        self._endpoint = endpoint or os.environ.get(ENDPOINT, "")
        self._made: Any = None

    def connect(self) -> None:
        """Raise UserError if the client is not installed, or no cluster is configured."""
        with _translated_errors("find the cluster"):
            _ = self._apis

    def create(self, body: dict[str, Any]) -> bool:
        """Create an object; return False if its name exists."""
        with _translated_errors(f"create {body['kind']} {body['metadata']['name']}"):
            try:
                self._plain(self._calls(body["kind"], "create")(body=body, _request_timeout=self._timeout))
            except Exception as error:
                if _status(error) != 409:
                    raise
                return False
        return True

    def get(self, kind: str, name: str) -> dict[str, Any] | None:
        """Return an object; None if the cluster says that it does not exist."""
        with _translated_errors(f"read {kind} {name}"):
            try:
                return self._plain(self._calls(kind, "read")(name=name, _request_timeout=self._timeout))
            except Exception as error:
                if _status(error) != 404:
                    raise
        return None

    def list(self, kind: str, labels: str) -> list[dict[str, Any]]:
        """Return the objects of a kind that match a label selector."""
        with _translated_errors(f"list {kind}s"):
            found = self._calls(kind, "list")(label_selector=labels, _request_timeout=self._timeout)
            return self._plain(found)["items"]

    def delete(self, kind: str, name: str, grace: int | None = None) -> None:
        """Delete an object after its dependents, unless it does not exist.

        `grace` replaces the seconds that a pod has to end.
        """
        more = {} if grace is None else {"grace_period_seconds": grace}
        with _translated_errors(f"delete {kind} {name}"):
            try:
                delete = self._calls(kind, "delete")
                delete(name=name, propagation_policy="Foreground", _request_timeout=self._timeout, **more)
            except Exception as error:
                if _status(error) != 404:
                    raise

    def log(self, pod: str) -> bytes:
        """Return the log of a pod; b"" if the pod is gone or has not begun."""
        with _translated_errors(f"read the log of {pod}"):
            try:
                read = self._apis[0].read_namespaced_pod_log
                answer = read(pod, self.name, _preload_content=False, _request_timeout=self._timeout)
                return answer.data
            except Exception as error:
                if _status(error) not in (400, 404):
                    raise
        return b""

    def _plain(self, found: Any) -> dict[str, Any]:
        plain = self._apis[2].sanitize_for_serialization(found)
        if not (isinstance(plain, dict) and plain):  # before version 37 the client takes a proxy's page for an answer
            raise ValueError(f"the answer must be an object, got {str(plain)[:80]!r}")
        return plain

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
    """Return the current context of kubeconfig; "" within a cluster."""
    if endpoint or os.environ.get(ENDPOINT):
        return ""
    with _translated_errors("read kubeconfig"):
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
            raise NoClusterError(
                f"kubeconfig has no context {context!r} ({error}): see `kubectl config get-contexts`"
            ) from error
        with suppress(config.ConfigException):  # in a pod of the cluster itself
            config.load_incluster_config(client_configuration=made)
            return client.ApiClient(made)
        raise NoClusterError(
            "no cluster is configured here: run `gcloud container clusters get-credentials NAME`"
        ) from error
    return client.ApiClient(made)


def _status(error: Exception) -> int:
    """Return the HTTP status of an error; 0 if there was no answer."""
    return int(getattr(error, "status", 0) or 0)


@contextmanager
def _translated_errors(what: str) -> Iterator[None]:
    """Turn every exception of the client into a UserError."""
    try:
        import kubernetes.client  # noqa: F401
    except ImportError as error:
        raise MissingPackageError(
            f"backend gke needs kubernetes ({error}): pip install 'dovetail[gke]'", param="backend"
        ) from error
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        status, says = _status(error), f"could not {what}: {_line(error)}"
        full = status == 403 and "quota" in says.lower()
        if 400 <= status < 500 and status not in AGAIN and not full:
            raise UserError(says, code="cloud_refused") from error
        # No complete answer, or one that says to try again: the request may have succeeded nevertheless.
        raise UnavailableError(says, elsewhere=full) from error


def _line(error: Exception) -> str:
    """Return the server's message, from the JSON of its answer."""
    with suppress(ValueError, TypeError, KeyError):
        return f"{_status(error)}: {json.loads(getattr(error, 'body', ''))['message']}"[:300]
    return " ".join(str(error).split())[:300]
