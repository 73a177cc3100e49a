"""Policies and the circuit breaker: checked, kept, applied; open until a person closes it."""

from __future__ import annotations

import asyncio

import httpx
import pytest
from sqlalchemy import Engine

from tests.daemon.node import Node
from xmigd.database.writer import Writer
from xmigd.errors import Conflict, Invalid, NotFound, Stale
from xmigd.events.bus import Bus
from xmigd.policies.breaker import Breaker
from xmigd.policies.service import BreakerPolicy, Policies
from xmigd.settings import Settings

from .callers import request_as

ANY = {"if-match": "*"}


def accept(version: int) -> None:
    pass


class TestPolicies:
    def test_checked_kept_and_applied(self, writer: Writer, readers: Engine) -> None:
        settings = Settings(max_attempts=5, snapshot_cost=0.01)

        async def test() -> None:
            policies = Policies(settings, writer, readers)
            applied: list[object] = []
            policies.applied_by("recovery", lambda policy: applied.append(policy.max_attempts))
            state = await policies.change("recovery", {"max_attempts": 3}, by="me", check=accept)
            assert (state.version, state.settings["max_attempts"], state.defaults["max_attempts"]) == (1, 3, 5)
            assert applied == [5, 3]
            for change in (
                {"max_attempts": 0},
                {"snapshot_cost": float("nan")},
                {"stall_bound": 0},
                {"x": 1},
                {"max_attempts": True},
            ):
                with pytest.raises(Invalid):
                    await policies.change("recovery", change, by="me", check=accept)
            with pytest.raises(NotFound):
                await policies.change("x", {}, by="me", check=accept)

            def refuse(version: int) -> None:
                assert version == 1
                raise Stale("no")

            with pytest.raises(Stale):
                await policies.change("recovery", {"max_attempts": 4}, by="me", check=refuse)
            again = Policies(Settings(max_attempts=9, snapshot_cost=0.02), writer, readers)
            assert again.state("recovery").settings | {"hang_timeout": 0} == {
                "max_attempts": 3, "stall_bound": 0.2, "snapshot_cost": 0.02, "hang_timeout": 0,
            }  # fmt: skip
            state = await again.change("recovery", {"max_attempts": None}, by="me", check=accept)
            assert (state.version, state.settings["max_attempts"]) == (2, 9)

        asyncio.run(test())

    def test_over_the_api(self, http: httpx.Client, daemon: Node) -> None:
        names = {policy["name"]: policy for policy in http.get("/v1/policies").json()}
        assert names.keys() == {"recovery", "circuit-breaker", "devices", "retention"}
        assert all(policy["units"].keys() == policy["settings"].keys() for policy in names.values())
        assert names["recovery"]["units"]["hang_timeout"] == "seconds"
        found = http.get("/v1/policies/recovery")
        assert found.headers["etag"] == '"0"'
        path, body = "/v1/policies/recovery", {"max_attempts": 7}
        for headers, status in (({}, 428), ({"if-match": '"5"'}, 412), ({"if-match": '"0"'}, 200)):
            assert http.patch(path, json=body, headers=headers).status_code == status
        changed = http.get(path).json()
        assert (changed["settings"]["max_attempts"], changed["version"]) == (7, 1)
        assert changed["updated_by"].startswith("user ")
        for wrong in ({"max_attempts": 0.5}, {"max": 1}):
            assert http.patch(path, json=wrong, headers=ANY).status_code == 422
        assert http.get("/v1/policies/x").status_code == 404
        assert request_as(daemon, 60010, "PATCH", path, body={}, headers=ANY)[0] == 403


class TestBreaker:
    def test_it_opens_and_stays_open(self, writer: Writer, readers: Engine) -> None:
        policy = BreakerPolicy(max_actions=3, window_seconds=600)

        async def test() -> None:
            bus = Bus(writer, newest=0)
            heard = bus.subscribe(lambda event: event.type == "breaker.changed")
            breaker = Breaker(writer, readers, bus, lambda: policy)
            for number in range(3):
                breaker.check()
                breaker.acted("loss", "process", str(number), "it was lost")
            with pytest.raises(Conflict, match="3 automatic actions within 600 s") as conflict:
                breaker.check()
            assert conflict.value.code == "breaker_open"
            breaker.acted("drain", "device", "cpu:0")
            await bus.flushed()
            assert [event.data["state"] for event in await heard.read(30)] == ["open"]
            again = Breaker(writer, readers, bus, lambda: policy)
            assert (again.state, len(again.actions())) == ("open", 4)
            await again.reset("user 0")
            again.check()
            again.acted("loss", "process", "9")
            assert (again.state, len(again.actions())) == ("closed", 1)
            await bus.close()
            assert [event.data["why"] for event in await heard.read(30)] == ["closed by user 0"]

        asyncio.run(test())

    def test_what_is_old_does_not_count(self, writer: Writer, readers: Engine) -> None:
        async def test() -> None:
            bus = Bus(writer, newest=0)
            breaker = Breaker(writer, readers, bus, lambda: BreakerPolicy(max_actions=2, window_seconds=1))
            breaker.acted("loss", "process", "1")
            breaker._actions[0]["at"] -= 2
            breaker.acted("loss", "process", "2")
            breaker.check()
            await bus.close()

        asyncio.run(test())

    def test_over_the_api(self, http: httpx.Client, daemon: Node) -> None:
        found = http.get("/v1/circuit-breaker").json()
        assert (found["state"], found["actions"], found["max_actions"]) == ("closed", [], 10)
        assert http.post("/v1/circuit-breaker:reset").json()["state"] == "closed"
        assert request_as(daemon, 60010, "POST", "/v1/circuit-breaker:reset")[0] == 403
