"""Google's Cloud TPU client (v2, over REST), with three distinct answers: a value, no such resource, and not known.

DOVETAIL_TPU_ENDPOINT=http://127.0.0.1:PORT selects another server, without credentials.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from dovetail.core.errors import MissingPackageError, UserError
from dovetail.jobs.backends.backend import UnavailableError

ENDPOINT = "DOVETAIL_TPU_ENDPOINT"
AGAIN = (408, 409, 425, 429)  # a later call may succeed, as after any 5xx
FULL = ("quota", "capacity", "stockout", "resource_exhausted", "exhausted")  # another zone may have capacity


class QueuedResources:
    """Calls with full names: projects/P/locations/ZONE/queuedResources/Q.

    They raise UnavailableError if a later call may succeed, and another UserError if it will not.
    """

    def __init__(self, endpoint: str = "", timeout: float = 30.0) -> None:
        self._endpoint = endpoint or os.environ.get(ENDPOINT, "")
        self._timeout = timeout
        self._clients = threading.local()  # a client's HTTP session is not thread-safe

    def connect(self) -> None:
        """Raise UserError if the client is not installed, or has no credentials."""
        with _translated_errors("connect to Cloud TPU"):
            _ = self._client

    def create(self, parent: str, name: str, resource: dict[str, Any], request_id: str) -> str:
        """Return the operation that creates the resource; "" if the name exists."""
        with _translated_errors(f"create {name} in {parent}"):
            from google.api_core.exceptions import AlreadyExists, Conflict

            request = {
                "parent": parent, "queued_resource_id": name, "queued_resource": resource, "request_id": request_id,
            }  # fmt: skip
            try:
                return self._client.create_queued_resource(request, timeout=self._timeout).operation.name
            except (AlreadyExists, Conflict):
                return ""

    def get(self, name: str) -> Any | None:
        """Return a queued resource; None if the service says that it does not exist."""
        with _translated_errors(f"describe {name}"):
            return self._or_none(self._client.get_queued_resource, name)

    def node(self, name: str) -> Any | None:
        """Return a node; None if the service says that it does not exist."""
        with _translated_errors(f"describe {name}"):
            return self._or_none(self._client.get_node, name)

    def operation(self, name: str) -> Any | None:
        """Return an operation; None if the service says that it does not exist."""
        with _translated_errors(f"describe {name}"):
            operations = self._client.transport.operations_client
            return self._or_none(operations.get_operation, name)

    def delete(self, name: str) -> None:
        """Delete a queued resource with its nodes, unless it does not exist or is being deleted."""
        with _translated_errors(f"delete {name}"):
            from google.api_core.exceptions import Conflict, NotFound

            try:
                self._client.delete_queued_resource({"name": name, "force": True}, timeout=self._timeout)
            except NotFound:
                return
            except Conflict:  # it is being deleted, or another operation must end first
                there = self.get(name)
                if there is not None and there.state.state.name != "DELETING":
                    raise

    def delete_node(self, name: str) -> None:
        """Delete a node, unless it does not exist."""
        with _translated_errors(f"delete {name}"):
            from google.api_core.exceptions import NotFound

            try:
                self._client.delete_node(name=name, timeout=self._timeout)
            except NotFound:
                return

    def list(self, parent: str) -> list[Any]:
        """Return all queued resources of a zone."""
        with _translated_errors(f"list queued resources of {parent}"):
            return _all_pages(
                self._client.list_queued_resources(parent=parent, timeout=self._timeout), "queued_resources"
            )

    def nodes(self, parent: str) -> list[Any]:
        """Return all nodes of a zone."""
        with _translated_errors(f"list nodes of {parent}"):
            return _all_pages(self._client.list_nodes(parent=parent, timeout=self._timeout), "nodes")

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
            f"backend gcp-tpu needs google-cloud-tpu ({error}): pip install 'dovetail[gcp]'", param="backend"
        ) from error
    if endpoint:
        transport = TpuRestTransport(host=endpoint, credentials=AnonymousCredentials())
        return tpu_v2.TpuClient(transport=transport)
    return tpu_v2.TpuClient(transport="rest")


def _all_pages(pager: Any, field: str) -> list[Any]:
    """Return all pages, or raise: a part would look as if the rest did not exist."""
    found = []
    for page in pager.pages:
        if page.unreachable:
            raise UnavailableError(f"Cloud TPU could not reach {', '.join(page.unreachable)}")
        found += getattr(page, field)
    return found


@contextmanager
def _translated_errors(what: str) -> Iterator[None]:
    """Turn every exception of the client into a UserError."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise _translated(what, error) from error


def _translated(what: str, error: Exception) -> UserError:
    from google.api_core.exceptions import GoogleAPICallError
    from google.auth.exceptions import DefaultCredentialsError

    if isinstance(error, DefaultCredentialsError):
        return UserError(
            "there are no Google credentials here: run `gcloud auth application-default login`", code="no_credentials"
        )
    says = f"could not {what}: {_line(error)}"
    code = int(error.code or 0) if isinstance(error, GoogleAPICallError) else 0
    full = any(word in str(error).lower() for word in FULL)
    if 400 <= code < 500 and code not in AGAIN and not full:
        return UserError(says, code="cloud_refused")
    # No complete answer, or one that says to try again: the request may have succeeded nevertheless.
    return UnavailableError(says, elsewhere=full)


def _line(error: Exception) -> str:
    text = getattr(error, "message", "") or str(error) or type(error).__name__
    return re.sub(r"^[A-Z]+ https?://\S+: ", "", " ".join(text.split()))[:300]
