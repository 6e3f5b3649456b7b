"""Groups of real processes with a gloo process group: each rank runs many calls, and a test may kill or stop it.

A zygote has imported torch, so a group of four is ready in a tenth of a second. A test hands over a function by name
(any function at the top of a module, even the test's own), and gets its result, exception and warnings::

    def _save(path):
        return fastckpt.distributed.save(parallel.state("fsdp"), path).bytes_total

    def test_saves(forge, tmp_path):
        with forge.group(4) as group:
            group.run(_save, tmp_path / "c")

Every wait has an end, and a group ends all its processes. ``forge`` is a fixture of tests/conftest.py.
"""

from __future__ import annotations

import base64
import builtins
import contextlib
import os
import pickle
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from harness import zygote

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "GLOG_minloglevel": "2",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    # The server of a TCPStore looks up the host name of each client, and serves no other client meanwhile.
    "RES_OPTIONS": "timeout:1 attempts:1",
    "FASTCKPT_TEST_HUGE": "1",
}
# DeepSpeed is imported by each Trainer, which takes a third of a second.
FRAMEWORKS = (
    "harness.member,transformers.trainer,transformers.models.llama.modeling_llama,accelerate,deepspeed,peft,lightning,"
    "torchdata.stateful_dataloader,harness.conversions"
)
# Warnings of torch itself in ranks, which do not concern the tests.
NOISE: tuple[str, ...] = ("DTensor random operators may not have complete support on cpu",)  # torch 2.6, of any mesh
# The channel from this process to its test, if this process is a rank.
here: zygote.Channel | None = None


def report(value: Any) -> None:
    """Report something to the test from within a call; :meth:`Group.heard` returns it."""
    if here is None:
        raise AssertionError("only a rank of a group can report to a test")
    here.send({"heard": encode(value)})


def encode(value: Any) -> str:
    return base64.b64encode(pickle.dumps(value)).decode("ascii")


def decode(text: str) -> Any:
    return pickle.loads(base64.b64decode(text))


@dataclass
class Strike:
    """A fault of a rank: a signal to itself, or an exception, at the ``nth`` call of ``where``
    (``module:attribute`` or ``module:Class.method``, even in the compiled core) that has ``match`` among its
    positional arguments."""

    rank: int
    where: str
    signal: int | BaseException = signal.SIGKILL
    when: Literal["before", "after"] = "before"
    match: Any = None
    nth: int = 1


@dataclass
class Raised:
    """The description of a rank's exception. ``error`` is the exception itself if it can be pickled."""

    kind: str
    bases: list[str]
    errno: int | None
    text: str
    notes: list[str]
    failures: list[tuple[int, str, str]]
    trace: str = field(repr=False)
    error: BaseException | None = field(repr=False, default=None)


@dataclass
class Outcome:
    """The end of a call on one rank. ``began`` and ``ended`` are times of ``time.monotonic``, which all processes
    share. ``status`` is the wait status of a rank that died."""

    rank: int
    kind: Literal["returned", "raised", "died", "stopped", "silent"]
    value: Any = None
    raised: Raised | None = None
    began: float = 0.0
    ended: float = 0.0
    warnings: list[tuple[str, str, str, int]] = field(default_factory=list)
    status: int | None = None

    @property
    def seconds(self) -> float:
        return self.ended - self.began


def told_of(outcomes: Sequence[Outcome], rank: int, number: int) -> None:
    """Assert that one rank has raised the error of its storage, and that the others' errors name only that rank."""
    for each in outcomes:
        assert each.kind == "raised", each
        if each.rank == rank:
            assert "OSError" in each.raised.bases, each.raised.trace
            assert each.raised.errno == number
        else:
            assert each.raised.kind == "RanksError", each.raised.trace
            assert [failure[0] for failure in each.raised.failures] == [rank]
            assert os.strerror(number) in each.raised.text
            assert "nothing was committed" in each.raised.text


class FailedError(AssertionError):
    """A call did not return on all ranks; ``outcomes`` has the call's end on each rank."""

    def __init__(self, outcomes: Sequence[Outcome]) -> None:
        self.outcomes = list(outcomes)
        lines = [
            f"rank {each.rank} {each.kind if each.status is None else zygote.ending(each.status)}"
            for each in outcomes
            if each.kind != "returned"
        ]
        traces = [f"-- rank {each.rank}:\n{each.raised.trace}" for each in outcomes if each.raised is not None]
        super().__init__("\n".join(["; ".join(lines), *traces]))


class Group:
    """Ranks 0 to ``size`` - 1. Use :meth:`Forge.group`."""

    def __init__(self, zygotes: Sequence[zygote.Zygote], store: str, host: str, backend: str, timeout: float) -> None:
        self.size = len(zygotes)
        self.children: list[zygote.Child] = []
        self._heard: list[list[Any]] = [[] for _ in zygotes]
        self._busy: set[int] = set()
        self._dead: set[int] = set()
        self._keeper: zygote.Child | None = None
        # The time.monotonic() of the last strike, or None before a strike.
        self.struck: float | None = None
        try:
            port = 0
            if store == "apart":
                self._keeper = zygotes[0].start("harness.member:store", host=host)
                port = int(self._keeper.next())
            common = {"size": self.size, "host": host, "backend": backend, "timeout": timeout, "apart": port != 0}
            for rank, each in enumerate(zygotes):
                child = each.start("harness.member:serve", rank=rank, port=port, **common)
                self.children.append(child)
                if port == 0:
                    port = int(child.next())
            for child in self.children:
                child.next()
        except BaseException:
            self.close()
            raise

    def start(
        self,
        function: Callable[..., Any],
        /,
        *args: Any,
        ranks: Sequence[int] | None = None,
        strike: Strike | None = None,
        **kwargs: Any,
    ) -> None:
        """Begin ``function(*args, **kwargs)`` on all ranks, or ``ranks``, and return at once. Arguments are pickled."""
        home = Path(sys.modules[function.__module__].__file__ or "").parent
        named = (function.__module__, function.__qualname__, str(home))
        self.struck = None
        for rank in range(self.size) if ranks is None else ranks:
            if rank in self._busy or rank in self._dead:
                raise AssertionError(f"rank {rank} is still in its last call, or dead")
            blow = strike if strike is not None and strike.rank == rank else None
            self.children[rank].channel.send({"function": named, "with": encode((args, kwargs, blow))})
            self._busy.add(rank)

    def outcomes(self, timeout: float = 60.0, *, ranks: Sequence[int] | None = None) -> list[Outcome]:
        """The end of the call on each rank that runs a call, in order of rank. For a rank that is stopped, or
        sends nothing for ``timeout`` seconds, this may be called again."""
        deadline = time.monotonic() + timeout
        chosen = sorted(self._busy) if ranks is None else ranks
        return [self._outcome(rank, deadline) for rank in chosen]

    def run(self, function: Callable[..., Any], /, *args: Any, timeout: float = 60.0, **kwargs: Any) -> list[Any]:
        """Run on all ranks, or on ``ranks``, and return the results; raise :class:`FailedError` unless all returned. A
        rank's warnings are issued again here."""
        self.start(function, *args, **kwargs)
        outcomes = self.outcomes(timeout)
        if any(each.kind != "returned" for each in outcomes):
            raise FailedError(outcomes)
        for each in outcomes:
            for name, text, filename, line in each.warnings:
                if not any(noise in text for noise in NOISE):
                    kind = getattr(builtins, name, UserWarning)
                    warnings.warn_explicit(f"rank {each.rank}: {text}", kind, filename, line)
        return [each.value for each in outcomes]

    def heard(self, rank: int, timeout: float = 60.0) -> Any:
        """The next value that the rank's call has passed to :func:`report`."""
        if not self._heard[rank]:
            message = self.children[rank].channel.receive(timeout)
            if "heard" not in message:
                raise AssertionError(f"rank {rank} reported nothing more: {message}")
            self._heard[rank].append(decode(message["heard"]))
        return self._heard[rank].pop(0)

    def stop(self, rank: int) -> None:
        """Stop all threads of a rank by SIGSTOP."""
        self.children[rank].stop()

    def resume(self, rank: int) -> None:
        self.children[rank].signal(signal.SIGCONT)

    def kill(self, rank: int) -> None:
        """Kill a rank by SIGKILL, and wait until it is gone."""
        self.children[rank].kill()

    def kill_store(self) -> None:
        """Kill the process of the store, in a group with ``store="apart"``."""
        self._store.kill()

    def stop_store(self) -> None:
        """Stop the process of the store by SIGSTOP."""
        self._store.stop()

    def resume_store(self) -> None:
        self._store.signal(signal.SIGCONT)

    @property
    def _store(self) -> zygote.Child:
        if self._keeper is None:
            raise AssertionError("rank 0 has the store")
        return self._keeper

    def close(self) -> None:
        """End all processes of the group, whatever they are doing."""
        for child in filter(None, [*self.children, self._keeper]):
            child.kill()
            child.channel.sock.close()

    def _outcome(self, rank: int, deadline: float) -> Outcome:
        while True:
            try:
                message = self.children[rank].channel.receive(max(0.0, deadline - time.monotonic()))
            except TimeoutError:
                return Outcome(rank, "silent")
            except EOFError:
                self._busy.discard(rank)
                self._dead.add(rank)
                return Outcome(rank, "died", status=self.children[rank].wait())
            if "heard" in message:
                self._heard[rank].append(decode(message["heard"]))
            elif "answer" in message:
                self._busy.discard(rank)
                answer = decode(message["answer"])
                raised = answer.pop("raised", None)
                return Outcome(rank, raised=None if raised is None else Raised(**raised), **answer)
            elif "raised" in message:
                raise AssertionError(f"rank {rank}: {message['raised']['trace']}")
            else:
                self.struck = message["at"]
                if message["struck"]:
                    # The rank reports before it stops, so a SIGCONT right after the report would be too early.
                    self.children[rank].until_stopped()
                    return Outcome(rank, "stopped")


class Forge:
    """Makes groups from one zygote. Use :func:`forge`."""

    def __init__(self, parent: zygote.Zygote) -> None:
        self.zygote = parent

    @contextlib.contextmanager
    def group(
        self,
        size: int,
        *,
        store: Literal["apart", "rank0"] = "apart",
        backend: str = "gloo",
        host: str = "127.0.0.1",
        timeout: float = 60.0,
        zygotes: Sequence[zygote.Zygote] | None = None,
    ) -> Iterator[Group]:
        """A group of ``size`` ranks for the ``with`` statement. ``store``: in a separate process, as in torchrun's
        agent, or in rank 0; ``backend=""``: no process group; ``timeout``: of torch's group and store, in seconds;
        ``zygotes``: one per rank, for ranks in several network namespaces, which reach the store at ``host``."""
        made = Group(zygotes or [self.zygote] * size, store, host, backend, timeout)
        try:
            yield made
        finally:
            made.close()


@contextlib.contextmanager
def forge(*prefix: str, env: dict[str, str] | None = None) -> Iterator[Forge]:
    """A zygote with torch for the ``with`` statement; ``prefix`` is a command to run it under, and ``env`` is added to
    its environment."""
    variables = {**ENVIRONMENT, "FASTCKPT_TEST_IMPORT": "harness.member", **(env or {})}
    with zygote.running(*prefix, env=variables) as parent:
        yield Forge(parent)


def frameworks(*more: str) -> contextlib.AbstractContextManager[Forge]:
    """A forge of processes that have imported transformers, accelerate and Lightning, and more."""
    env = {"FASTCKPT_TEST_IMPORT": FRAMEWORKS, "PYTHONWARNINGS": "ignore", "HF_HUB_OFFLINE": "1"}
    return forge(env={**env, zygote.MORE: ",".join(more)} if more else env)
