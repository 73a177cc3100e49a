"""Operations followed to their end, in front of a daemon whose answers are written down."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from xmigd.cli import follow
from xmigd.cli.exits import CommandError, Exit
from xmigd.cli.follow import OnInterrupt, carry_out
from xmigd.cli.output import Output
from xmigd.client import Client
from xmigd.settings import Settings

from .conftest import Answer, Scripted


@pytest.fixture
def client(scripted: Scripted) -> Iterator[Client]:
    client = Client(Settings(runtime_dir=scripted.folder))
    yield client
    client.close()


def operation(state: str, **more: Any) -> dict[str, Any]:
    return {"id": "77", "kind": "migration", "state": state, "phase": "copying", "may_cancel": True, "progress": None,
            "error": None} | more  # fmt: skip


def script(*states: dict[str, Any] | None) -> Callable[[str, str, Any], Answer]:
    """What the operation is at each look; the last one stays. None: the daemon is being restarted."""
    left = list(states)

    def answer(method: str, path: str, body: Any) -> Answer:
        if method == "POST":
            return 202, operation("pending")
        if method == "DELETE":
            left[:] = [operation("cancelled", error={"detail": "cancelled by root", "process_location": "source"})]
            return 202, operation("running")
        assert path == "/v1/operations/77"
        now = left.pop(0) if len(left) > 1 else left[0]
        return (0, None) if now is None else (200, now)

    return answer


def test_it_succeeds(scripted: Scripted, client: Client, capfd: pytest.CaptureFixture[str]) -> None:
    progress = {"total_bytes": 4 << 20, "processed_bytes": 1 << 20, "bytes_per_s": 1 << 30, "iteration": 2}
    scripted.answer = script(operation("running", progress=progress), None, operation("succeeded", result={"ms": 3}))
    done = carry_out(client, "/v1/migrations", {"process": "a"}, wait=True, output=Output.table)
    assert done is not None
    assert done["result"] == {"ms": 3}
    assert "migration running copying  1.0 MiB of 4.0 MiB · 1.0 GiB/s · round 2" in capfd.readouterr().err


def test_it_is_only_started(scripted: Scripted, client: Client, capfd: pytest.CaptureFixture[str]) -> None:
    scripted.answer = script(operation("running"))
    assert carry_out(client, "/v1/migrations", {}, wait=False, output=Output.table) is None
    assert "xmigctl op watch 77" in capfd.readouterr().out
    assert len(scripted.requests) == 1


def test_it_fails(scripted: Scripted, client: Client) -> None:
    error = {"detail": "the target died", "hint": "look at cpu:1", "process_location": "source", "code": "target_lost"}
    scripted.answer = script(operation("failed", error=error))
    with pytest.raises(CommandError) as caught:
        carry_out(client, "/v1/migrations", {}, wait=True, output=Output.table)
    assert caught.value.exit_code == Exit.OPERATION_FAILED
    assert str(caught.value) == (
        "the migration failed in phase copying: the target died; the process is where it was; look at cpu:1"
    )


def test_json_fails_with_the_same_code(scripted: Scripted, client: Client, capfd: pytest.CaptureFixture[str]) -> None:
    scripted.answer = script(operation("failed", error={"detail": "no"}))
    with pytest.raises(SystemExit) as caught:
        carry_out(client, "/v1/migrations", {}, wait=True, output=Output.json)
    assert caught.value.code == Exit.OPERATION_FAILED
    assert '"state": "failed"' in capfd.readouterr().out


@pytest.fixture
def interrupt(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Ctrl-C at each of the first so many looks."""

    def arm(times: int) -> None:
        left = [times]

        def sleep(_: float) -> None:
            if left[0]:
                left[0] -= 1
                raise KeyboardInterrupt

        # Its own view of the module: other threads of this process sleep, too.
        monkeypatch.setattr("xmigd.cli.follow.time", SimpleNamespace(sleep=sleep, monotonic=time.monotonic))

    return arm


def test_an_interrupt_cancels(scripted: Scripted, client: Client, interrupt: Callable[[int], None]) -> None:
    scripted.answer = script(operation("running"))
    interrupt(1)
    with pytest.raises(CommandError, match="cancelled by root; the process is where it was") as caught:
        carry_out(client, "/v1/migrations", {}, wait=True, output=Output.table)
    assert caught.value.exit_code == Exit.CANCELLED
    assert any(method == "DELETE" for method, *_ in scripted.requests)


def test_an_interrupt_detaches_when_requested(
    scripted: Scripted, client: Client, interrupt: Callable[[int], None]
) -> None:
    scripted.answer = script(operation("running"))
    interrupt(1)
    with pytest.raises(CommandError, match="goes on; xmigctl op watch 77") as caught:
        carry_out(client, "/v1/x", {}, wait=True, output=Output.table, on_interrupt=OnInterrupt.detach)
    assert caught.value.exit_code == Exit.NOT_OVER
    assert not any(method == "DELETE" for method, *_ in scripted.requests)


def test_past_the_point_of_no_return(
    scripted: Scripted, client: Client, interrupt: Callable[[int], None], capfd: pytest.CaptureFixture[str]
) -> None:
    scripted.answer = script(operation("running", may_cancel=False, may_cancel_why="the target has taken over"))
    interrupt(1)
    with pytest.raises(CommandError) as caught:
        carry_out(client, "/v1/migrations", {}, wait=True, output=Output.table)
    assert caught.value.exit_code == Exit.NOT_OVER
    assert "cannot be cancelled any more: the target has taken over" in capfd.readouterr().err
    assert not any(method == "DELETE" for method, *_ in scripted.requests)


def test_time_is_up(scripted: Scripted, client: Client) -> None:
    scripted.answer = script(operation("running"))
    with pytest.raises(CommandError) as caught:
        follow.follow(client, operation("running"), timeout=0)
    assert caught.value.exit_code == Exit.NOT_OVER
