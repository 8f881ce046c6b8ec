"""What backends hold under our label and no job wants: found, and given back.

An attempt's row is written before its create, so that whatever carries our label and has no row is nobody's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dovetail.jobs.attempt import Resource
from dovetail.jobs.backends.backend import Backend, Unavailable
from dovetail.jobs.store import Store

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Orphan:
    backend: str
    resource: Resource


def orphans(store: Store, backends: Callable[[str], Backend], names: Sequence[str] = ()) -> list[Orphan]:
    """`names`: of backends to ask; those that jobs have used if not given. One that cannot be asked is passed over."""
    found = []
    for name in names or store.backends():
        try:
            held = backends(name).list()
        except (Unavailable, ValueError, ImportError, OSError) as error:
            log.warning("cannot list what %s holds: %s", name, error)
            continue
        # asked after the list was made: an attempt begun meanwhile is in the table by now
        wanted = {(row.job, row.number) for row in store.live()}
        found += [Orphan(name, one) for one in held if one.attempt not in wanted]
    return found


def reap(store: Store, backends: Callable[[str], Backend], names: Sequence[str] = ()) -> list[Orphan]:
    """Give them back; those that were."""
    done = []
    for orphan in orphans(store, backends, names):
        job, number = orphan.resource.attempt or (orphan.resource.name, 0)
        store.intend(job, number, "reap")
        try:
            backends(orphan.backend).delete(orphan.resource)
        except (Unavailable, ValueError) as error:
            log.warning("cannot remove %s: %s", orphan.resource.name, error)
            continue
        store.settle(job, number, "reap")
        done.append(orphan)
    return done
