"""The lease of a job: whoever moves it to another node has it, and nobody else has it then.

A lease is a key in etcd that is created only where there is none, and goes with etcd's lease when that is not kept
alive. The revision at which it was created is its *token*: each later lease of the same job has a larger one. Whoever
moves the job checks, right before the point of no return, that the key is there with that token.

Invariants:
  This node takes its lease as lost before etcd can give it to somebody else: its time is counted from the moment before
  a request, etcd's from the moment after it.
  What etcd does not answer counts as no.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator

from xmigd import log
from xmigd.errors import Conflict, Unavailable, XmigError
from xmigd.ids import new_id
from xmigd.leases.etcd import Etcd, Found, NotFoundThere
from xmigd.settings import Settings
from xmigd.text import harmless

PREFIX = "/xmig/jobs"
TIMEOUT = 2.0  # seconds, at most, that an endpoint has for its answer
SAFETY = 0.1  # share of a lease's time by which this node takes it as lost earlier

logger = log.get("leases")


class Lease:
    """One that this node has. Lives in the event loop's thread."""

    def __init__(self, key: str, number: int, token: int, expires: float) -> None:
        self.key = key
        self.number = number
        self.token = token
        self.expires = expires  # monotonic seconds
        self.lost = asyncio.Event()
        self.why = ""

    def lose(self, why: str) -> None:
        if not self.lost.is_set():
            self.why = why
            self.lost.set()
            logger.warning("a lease is lost", key=self.key, why=why)


class Leases:
    """`node`: who takes them."""

    def __init__(self, etcd: Etcd, *, node: str, seconds: int) -> None:
        self._etcd = etcd
        self._node = node
        self._seconds = seconds

    @staticmethod
    def key(node: str, job: str) -> str:
        """Of a job on this node."""
        return f"{PREFIX}/{node}/{job}"

    @contextlib.asynccontextmanager
    async def hold(self, node: str, job: str) -> AsyncIterator[Lease]:
        """Raises Conflict: somebody else has it; Unavailable."""
        lease = await self._take(self.key(node, job))
        keeping = asyncio.ensure_future(self._keep(lease))
        try:
            yield lease
        finally:
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)
            await self._give_back(lease.number)

    async def verify(self, node: str, job: str, token: int) -> None:
        """Is that the lease of this job, now? Raises Conflict: it is not; Unavailable: nobody knows."""
        try:
            found = await self._etcd.get(self.key(node, job))
        except NotFoundThere:
            found = None
        if found is None:
            raise Conflict("the lease under which this job is to be moved has expired", code="lease_lost",
                           hint="make a new plan")  # fmt: skip
        if found.create_revision != token:
            raise Conflict(f"the job has another lease by now, of {_holder(found)}", code="lease_lost",
                           hint="make a new plan")  # fmt: skip

    def close(self) -> None:
        self._etcd.close()

    async def _take(self, key: str) -> Lease:
        began = time.monotonic()
        try:
            number = await self._etcd.grant(self._seconds)
        except NotFoundThere:
            raise Unavailable("etcd grants no lease", code="etcd_wrong") from None
        mark = new_id()
        value = json.dumps({"node": self._node, "mark": mark}).encode()
        try:
            found = await self._etcd.create(key, value, number)
            # If an answer was lost and the request repeated, it is ours all the same.
            if found is not None and found.value != value:
                raise Conflict(f"{_holder(found)} has the lease of this job", code="lease_taken",
                               hint="somebody else moves it; try again when that is over")  # fmt: skip
            found = await self._etcd.get(key)
            if found is None or found.value != value:
                raise Conflict("the job's lease was lost at once", code="lease_lost", hint="look at etcd")
        except NotFoundThere:
            raise Conflict("the lease expired before it was used", code="lease_lost", hint="look at etcd") from None
        except BaseException:
            await self._give_back(number)
            raise
        return Lease(key, number, found.create_revision, began + self._seconds * (1 - SAFETY))

    async def _keep(self, lease: Lease) -> None:
        """Until it is lost, or this is cancelled."""
        why = ""
        while True:
            left = lease.expires - time.monotonic()
            if left <= 0:
                return lease.lose(why or "it was not kept alive in time")
            await asyncio.sleep(min(self._seconds / 3, left))
            began = time.monotonic()
            if began >= lease.expires:
                continue
            try:
                async with asyncio.timeout(lease.expires - began):
                    await self._etcd.keep_alive(lease.number)
            except NotFoundThere:
                return lease.lose("it has expired in etcd")
            except TimeoutError:
                why = why or "etcd does not answer"
            except XmigError as error:
                why = error.message
                await asyncio.sleep(min(0.2, max(0.0, lease.expires - time.monotonic())))
            else:
                lease.expires, why = began + self._seconds * (1 - SAFETY), ""

    async def _give_back(self, number: int) -> None:
        """Where that is not possible, it expires."""
        try:
            await self._etcd.revoke(number)
        except NotFoundThere:
            pass
        except XmigError as error:
            logger.info("a lease is not given back, and expires", why=error.message)


def leases_of(settings: Settings) -> Leases | None:
    """As the settings have them; None: there are none. Raises StartError."""
    endpoints = [each for each in settings.etcd_endpoints.split(",") if each]
    if not endpoints:
        return None
    etcd = Etcd(
        endpoints, timeout=min(TIMEOUT, settings.lease_seconds / 3), ca=settings.etcd_ca,
        certificate=settings.etcd_certificate, key=settings.etcd_key,
    )  # fmt: skip
    return Leases(etcd, node=settings.node, seconds=settings.lease_seconds)


def _holder(found: Found) -> str:
    with contextlib.suppress(ValueError, TypeError, KeyError):
        return harmless(str(json.loads(found.value)["node"]), 64)
    return "somebody"
