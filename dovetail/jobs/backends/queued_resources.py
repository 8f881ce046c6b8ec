"""Google's client of Cloud TPU (v2, over REST), with the three answers that matter kept apart: it is so, there is no
such thing, and nobody knows.

DOVETAIL_TPU_ENDPOINT=http://127.0.0.1:PORT leads it to another server, without credentials.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from dovetail.core.errors import MissingPackageError
from dovetail.jobs.backends.backend import Unavailable

ENDPOINT = "DOVETAIL_TPU_ENDPOINT"
AGAIN = (408, 409, 425, 429)  # a later call may well be granted; so may it be after any 5xx
FULL = (
    "quota",
    "capacity",
    "stockout",
    "resource_exhausted",
    "exhausted",
)  # words of a refusal that another zone lacks


class QueuedResources:
    """Names are full: projects/P/locations/ZONE/queuedResources/Q. `Unavailable` is raised for what may pass, and
    ValueError for what will not."""

    def __init__(self, endpoint: str = "", timeout: float = 30.0) -> None:
        self._endpoint = endpoint or os.environ.get(ENDPOINT, "")
        self._timeout = timeout
        self._clients = threading.local()  # its session of HTTP is not made for several threads

    def connect(self) -> None:
        """ImportError or ValueError where there is no client, or there are no credentials for it."""
        with _asked("connect to Cloud TPU"):
            _ = self._client

    def create(self, parent: str, name: str, resource: dict[str, Any], request_id: str) -> str:
        """The operation that makes it; "" where there is one of that name already."""
        with _asked(f"create {name} in {parent}"):
            from google.api_core.exceptions import AlreadyExists, Conflict

            request = {
                "parent": parent, "queued_resource_id": name, "queued_resource": resource, "request_id": request_id,
            }  # fmt: skip
            try:
                return self._client.create_queued_resource(request, timeout=self._timeout).operation.name
            except (AlreadyExists, Conflict):
                return ""

    def get(self, name: str) -> Any | None:
        """None: the service says that there is none."""
        with _asked(f"describe {name}"):
            return self._or_none(self._client.get_queued_resource, name)

    def node(self, name: str) -> Any | None:
        with _asked(f"describe {name}"):
            return self._or_none(self._client.get_node, name)

    def operation(self, name: str) -> Any | None:
        with _asked(f"describe {name}"):
            operations = self._client.transport.operations_client
            return self._or_none(operations.get_operation, name)

    def delete(self, name: str) -> None:
        """With its nodes. Done where it is gone, or going, already."""
        with _asked(f"delete {name}"):
            from google.api_core.exceptions import Conflict, NotFound

            try:
                self._client.delete_queued_resource({"name": name, "force": True}, timeout=self._timeout)
            except NotFound:
                return
            except Conflict:  # it is being deleted, or something else is under way that a deletion must wait for
                there = self.get(name)
                if there is not None and there.state.state.name != "DELETING":
                    raise

    def delete_node(self, name: str) -> None:
        with _asked(f"delete {name}"):
            from google.api_core.exceptions import NotFound

            try:
                self._client.delete_node(name=name, timeout=self._timeout)
            except NotFound:
                return

    def list(self, parent: str) -> list[Any]:
        with _asked(f"list queued resources of {parent}"):
            return _whole(self._client.list_queued_resources(parent=parent, timeout=self._timeout), "queued_resources")

    def nodes(self, parent: str) -> list[Any]:
        with _asked(f"list nodes of {parent}"):
            return _whole(self._client.list_nodes(parent=parent, timeout=self._timeout), "nodes")

    def _or_none(self, ask: Any, name: str) -> Any | None:
        from google.api_core.exceptions import NotFound

        try:
            return ask(name=name, timeout=self._timeout)
        except NotFound:
            return None

    @property
    def _client(self) -> Any:
        if not hasattr(self._clients, "one"):
            self._clients.one = _client(self._endpoint)
        return self._clients.one


def _client(endpoint: str) -> Any:
    try:
        from google.auth.credentials import AnonymousCredentials
        from google.cloud import tpu_v2
        from google.cloud.tpu_v2.services.tpu.transports import TpuRestTransport
    except ImportError as error:
        raise MissingPackageError(
            f"backend gcp-tpu needs google-cloud-tpu ({error}): pip install 'dovetail[gcp]'"
        ) from error
    if endpoint:
        transport = TpuRestTransport(host=endpoint, credentials=AnonymousCredentials())
        return tpu_v2.TpuClient(transport=transport)
    return tpu_v2.TpuClient(transport="rest")


def _whole(pager: Any, field: str) -> list[Any]:
    """All pages, or none: a part would read as if the rest were not there."""
    found = []
    for page in pager.pages:
        if page.unreachable:
            raise Unavailable(f"Cloud TPU could not reach {', '.join(page.unreachable)}")
        found += getattr(page, field)
    return found


@contextmanager
def _asked(what: str) -> Iterator[None]:
    """Whatever goes wrong with a question, told as one of ours."""
    try:
        yield
    except (ImportError, Unavailable):
        raise
    except Exception as error:
        raise _told(what, error) from error


def _told(what: str, error: Exception) -> Exception:
    from google.api_core.exceptions import GoogleAPICallError
    from google.auth.exceptions import DefaultCredentialsError

    if isinstance(error, DefaultCredentialsError):
        return ValueError("no Google credentials are here: run `gcloud auth application-default login`")
    says = f"could not {what}: {_line(error)}"
    code = int(error.code or 0) if isinstance(error, GoogleAPICallError) else 0
    full = any(word in str(error).lower() for word in FULL)
    if 400 <= code < 500 and code not in AGAIN and not full:
        return ValueError(says)
    # No answer, half an answer, or one that says to come back: what was asked may have been done all the same.
    return Unavailable(says, elsewhere=full)


def _line(error: Exception) -> str:
    text = getattr(error, "message", "") or str(error) or type(error).__name__
    return re.sub(r"^[A-Z]+ https?://\S+: ", "", " ".join(text.split()))[:300]
