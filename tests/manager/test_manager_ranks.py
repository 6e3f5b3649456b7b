"""``fastckpt.Manager`` over a process group: all ranks save, keep and restore one run."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import signal
import socket

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard

import fastckpt
from fastckpt import distributed, when
from harness import groups, parallel, points

#: A long timeout, for busy machines, and a short one, after which a rank counts as missing.
TIMEOUT, SHORT = 60.0, 3.0
#: All ranks, with the long timeout.
RANKS = distributed.Ranks(timeout=TIMEOUT)


@pytest.fixture(scope="module")
def four(forge):
    """Ranks for all tests that do not end them."""
    with forge.group(4) as group:
        yield group


def state(step):
    """Return a tensor of which all ranks have parts, and a common value."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {"w": parallel.distributed(torch.full((64, 1000), float(step)), mesh, [Shard(0)]), "step": step}


def fill(out, *steps, **options):
    with fastckpt.Manager(out, ranks=RANKS, **options) as manager:
        return [manager.save(step, state(step)) for step in steps]


def test_saves_of_ranks_overlap(four, tmp_path):
    options = {"io": fastckpt.IO(max_in_flight=3)}
    four.run(fill, tmp_path / "run", *range(1, 7), keep=2, save_options=options)
    with fastckpt.Manager(tmp_path / "run", ranks="alone") as manager:
        assert manager.steps() == [5, 6]
        assert all(fastckpt.verify(manager.path(step)).ok for step in (5, 6))
        assert fastckpt.load(manager.path(6))["step"] == 6


def train(out, steps, options):
    """Train on from the run's last step; return this rank's record."""
    removed = []

    def counting(remove):
        return lambda path, **more: (removed.append(path), remove(path, **more))

    with (
        points.replaced(points.REMOVE, counting),
        fastckpt.Manager(out, ranks=RANKS, **options) as manager,
    ):
        found = manager.restore(into=state(0))
        first = found.step + 1 if found else 1
        saved = []
        for step in range(first, first + steps):
            if manager.should_save(step):
                assert manager.save(step, state(step), {"loss": 10.0 - step}, per_rank={"rank": dist.get_rank()})
                saved.append(step)
        manager.wait()
        here = found and (found.step, found.state["step"], float(found.state["w"].to_local().min()), found.per_rank)
        return here, saved, len(removed), manager.steps(), manager.best("loss"), manager._saves.step


def go_back(out):
    """Save three steps, go back to the second, and save another; return this rank's restore after that."""
    fill(out, 1000, 2000, 3000)
    with fastckpt.Manager(out, ranks=RANKS) as manager:
        manager.restore(into=state(0), step=2000)
        manager.save(2100, state(2100))
    found = fastckpt.Manager(out, ranks=RANKS).restore(into=state(0))
    left = fastckpt.Manager(out, ranks=RANKS).restore(into=state(0), step=3000)
    with fastckpt.open(f"{out}/step-00002100") as checkpoint:
        return found.step, found.state["step"], left.state["step"], checkpoint.metadata["lineage"]["continues"]


def begin_anew(out):
    """Restore after a run; return the error, and the result of a restore with ``fresh=True``."""
    manager = fastckpt.Manager(out, ranks=RANKS, name="other-{step}")
    try:
        manager.restore(into=state(0))
    except fastckpt.CheckpointError as error:
        return str(error), manager.restore(into=state(0), fresh=True)
    return None


def test_ranks_follow_the_branch_that_saved_last(four, tmp_path):
    assert four.run(go_back, tmp_path / "run") == [(2100, 2100, 3000, 2000)] * 4
    for text, found in four.run(begin_anew, tmp_path / "run"):
        assert "step-00001000 is a checkpoint" in text
        assert found is None


def stand_still(out, stale, options):
    """Save three steps, the last two with equal weights; return this rank's warnings after each, and the shares."""
    heard = []
    with fastckpt.Manager(out, ranks=RANKS, stale=stale, **options) as manager:
        for step in (1, 2, 3):
            mesh = init_device_mesh("cpu", (dist.get_world_size(),))
            trained = {"w": min(step, 2), "frozen": 0, "exp_avg": step}
            parts = {
                name: parallel.distributed(torch.full((64, 1000), float(value)), mesh, [Shard(0)])
                for name, value in trained.items()
            }
            manager.save(step, {"model": parts, "optimizer": {"exp_avg": parts.pop("exp_avg")}, "step": step})
            try:
                heard.append(manager.wait().warnings)
            except fastckpt.CheckpointError as error:
                heard.append(str(error))
            dist.barrier()
            if dist.get_rank() == 0:
                # None of the saved files is read again.
                for shard in out.glob(f"step-*{step}/**/*.safetensors"):
                    shard.write_bytes(b"")
            dist.barrier()
        return heard, [dict(one.changed) for one in manager.checkpoints()] if dist.get_rank() == 0 else None


@pytest.mark.parametrize("options", [{}, {"async_save": False}], ids=["async", "sync"])
@pytest.mark.parametrize("stale", ["warn", "raise", "ignore"])
def test_ranks_hear_that_training_stands_still(four, tmp_path, stale, options):
    found = four.run(stand_still, tmp_path / "run", stale, {"save_options": {"base": None}, **options})
    shares = [{}, {"model": 0.5, "optimizer": 1.0}, {"model": 0.0, "optimizer": 1.0}]
    for rank, (heard, seen) in enumerate(found):
        assert heard[:2] == [(), ()]
        if stale == "raise":
            assert "no tensor of the model has changed since step 2: model.w, model.frozen" in heard[2]
        elif stale == "warn" and rank == 0:
            assert len(heard[2]) == 1
            assert "no tensor of the model has changed since step 2: model.w, model.frozen" in heard[2][0]
        else:
            assert heard[2] == ()
        assert seen == (None if rank else shares)


@pytest.mark.parametrize("async_save", [True, False])
def test_a_run_is_saved_kept_and_restored(four, tmp_path, async_save):
    options = {"keep": 2, "save_when": 10, "async_save": async_save}
    first = four.run(train, tmp_path / "run", 35, options)
    second = four.run(train, tmp_path / "run", 10, options)
    for rank in range(4):
        # Only rank 0 removes checkpoints.
        assert first[rank] == (None, [10, 20, 30], int(rank == 0), [20, 30], 30, 30)
        own = (30, 30, 30.0, {"rank": rank})
        assert second[rank] == (own, [40], int(rank == 0), [30, 40], 40, 40)
    assert (tmp_path / "run" / "latest").read_text() == "step-00000040\n"
    alone = fastckpt.Manager(tmp_path / "run", read_only=True).restore()
    assert (alone.state["w"].shape, alone.per_rank) == ((64, 1000), None)


class Odd:
    """A custom policy that wants steps only on rank 0."""

    def due(self, moment):
        return dist.get_rank() == 0 and moment.step % 7 == 3


def save_some(out, policy, count):
    """Train until ``count`` steps are saved; return these steps."""
    policies = {
        "time": lambda: when.Every(time=0.1),
        "auto": lambda: when.Auto("1s", overhead=0.9),
        "continuously": when.Continuously,
        "own": Odd,
        "step": lambda: [when.Steps(2, 5), when.First(), when.Every(steps=4)],
    }
    saved, step = [], 0
    with fastckpt.Manager(out, ranks=RANKS, save_when=policies[policy]()) as manager:
        while len(saved) < count:
            step += 1
            if manager.save(step, {"step": step}):
                saved.append(step)
    return saved


@pytest.mark.parametrize("when", ["time", "auto", "continuously", "own", "step"])
def test_all_ranks_save_the_same_steps(four, tmp_path, when):
    first, *others = four.run(save_some, tmp_path / "run", when, 4)
    assert others == [first] * 3
    assert fastckpt.Manager(tmp_path / "run", read_only=True).steps() == first
    if when == "auto":
        assert first[0] == 2
    if when in {"own", "step"}:
        assert first == {"own": [3, 10, 17, 24], "step": [1, 2, 4, 5]}[when]


def count_rounds(out, calls):
    """Return how often a rank asked the others, and the steps that it saved."""
    asked = []
    with fastckpt.Manager(out, ranks=RANKS, save_when=[when.Steps(calls - 1), when.Every(time="1h")]) as (manager):
        decide = manager._ranks.decide
        manager._ranks.decide = lambda *given: (asked.append(given[1].step), decide(*given))[1]
        saved = [step for step in range(1, calls) if manager.should_save(step)]
    return len(asked), saved


def test_short_steps_are_not_slowed_by_questions_and_none_that_is_due_is_missed(four, tmp_path):
    for asked, saved in four.run(count_rounds, tmp_path / "run", 5000):
        assert saved == [4999]
        assert asked < 500


def fail_once(out, async_save):
    """Save a step, which fails on one rank, and save it again."""
    with fastckpt.Manager(out, ranks=RANKS, async_save=async_save) as manager:
        manager.save(1, state(1))
        manager.wait()
        told = ""
        try:
            manager.save(2, state(2))
            manager.wait()
        except (OSError, fastckpt.exceptions.RanksError) as error:
            told = f"{type(error).__name__}: {error}"
        between = manager._saves.step if async_save else None
        again = manager.save(2, state(2))
        manager.wait()
        return told, between, again, manager.steps(), manager._saves.step


@pytest.mark.parametrize("async_save", [True, False])
def test_a_save_that_fails_on_one_rank_fails_on_all_and_its_step_may_be_saved_again(four, tmp_path, async_save):
    strike = groups.Strike(1, points.WRITE, OSError(errno.ENOSPC, "No space left"), nth=2)
    four.start(fail_once, tmp_path / "run", async_save, strike=strike)
    for each in four.outcomes(2 * TIMEOUT):
        assert each.kind == "returned", each
        told, *after = each.value
        assert told.startswith("OSError" if each.rank == 1 else "RanksError")
        assert "No space left" in told
        assert after == [None, True, [1, 2], 2]


def leave_out(out):
    """Make other calls between an agreement and its save, and a save that all skip while another is in flight."""
    slow = {"io": fastckpt.IO(bandwidth_limit="1MB")}
    with fastckpt.Manager(out, ranks=RANKS, save_options=slow) as manager:
        assert manager.should_save(1)
        assert manager.save(1, state(1))
        assert manager.should_save(2)
        manager.wait()
        assert manager.save(2, state(2))
        assert manager.should_save(3)
        assert manager.save(4, state(4))
    return manager.steps()


def test_what_all_ranks_leave_out_costs_them_nothing_else(four, tmp_path):
    assert four.run(leave_out, tmp_path / "run", timeout=TIMEOUT) == [[1, 2, 4]] * 4


def miss(out, late, where):
    """Let one rank fail between the agreement and the save; return this rank's record, and the saved steps."""
    mine, told = dist.get_rank() == 2 - late, []
    last = 2 if late else 1

    def take(manager, step):
        assert manager.should_save(step)
        fails = mine and step == last
        if fails and where == "outside":
            raise KeyError("no such state")
        if fails and where == "goes on":
            return
        manager.save(step, state(step), {"loss": "low" if fails else 1.0})

    try:
        with fastckpt.Manager(out, ranks=RANKS, async_save=False) as manager:
            for step in range(1, last + 2):
                with contextlib.nullcontext() if where == "outside" else noted(told):
                    take(manager, step)
    except (KeyError, fastckpt.exceptions.RanksError) as error:
        told.append(f"{type(error).__name__}: {error}")
    return told, manager.steps()


@contextlib.contextmanager
def noted(told):
    try:
        yield
    except (TypeError, fastckpt.exceptions.RanksError) as error:
        told.append(f"{type(error).__name__}: {error}")


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("where", ["save", "outside", "goes on"])
def test_a_rank_that_fails_before_it_takes_part_in_the_save_tells_the_others(forge, tmp_path, late, where):
    """The arguments are bad, or the program fails or continues; the save may be the first, before which ranks have not
    met."""
    with forge.group(3) as group:
        found = group.run(miss, tmp_path / "run", late, where, timeout=TIMEOUT / 2)
    if where == "outside":
        steps, own, why = [1] * late, "KeyError: ", "its `with` statement ended with KeyError: 'no such state'"
    elif where == "goes on":
        last = 2 if late else 1
        for rank, (told, left) in enumerate(found):
            assert left == [step for step in range(1, last + 2) if step != last]
            assert len(told) == (0 if rank == 2 - late else 1)
            for text in told:
                assert text.startswith("RanksError: ")
                assert f"rank {2 - late} on {socket.gethostname()} failed: " in text
                assert f"it has gone on to step {last + 1} without the save" in text
        return
    else:
        steps, own, why = [1, 3] if late else [2], "TypeError: save: metrics: 'loss'", "its save has ended with TypeErr"
    for rank, ((told,), left) in enumerate(found):
        assert left == steps
        if rank == 2 - late:
            assert told.startswith(own)
        else:
            assert told.startswith("RanksError: ")
            assert f"rank {2 - late} on {socket.gethostname()} failed: " in told
            assert why in told


def restore(out):
    with fastckpt.Manager(out, ranks=RANKS, read_only=True) as manager:
        found = manager.restore(into=state(0))
        return found.step, [step for step, _ in found.skipped], float(found.state["w"].to_local().min())


@pytest.mark.parametrize("default", [True, False])
def test_one_rank_goes_on_where_several_have_saved(forge, tmp_path, default):
    """A group of one rank may also save DTensors and restore into DTensors."""
    with forge.group(2) as group:
        group.run(fill, tmp_path / "run", 1)
    if default:
        with forge.group(1) as group:
            assert group.run(go_on, tmp_path / "run") == [(1, 1.0, 1.0, [1, 2, 3])]
    else:
        with forge.group(2) as group:
            assert group.run(go_on_apart, tmp_path / "run") == [(1, 1.0, 1.0, [1, 2, 3])] * 2


def go_on(out, mesh=None):
    group = None if mesh is None else mesh.get_group()
    mesh = init_device_mesh("cpu", (1,)) if mesh is None else mesh
    into = {"w": parallel.distributed(torch.zeros(64, 1000), mesh, [Shard(0)]), "step": 0}
    with fastckpt.Manager(out, ranks=distributed.Ranks(group, timeout=TIMEOUT)) as manager:
        manager.save_on_signal(signal.SIGUSR1, exit=False)
        found = manager.restore(into=into)
        least, most = (float(bound()) for bound in (into["w"].to_local().min, into["w"].to_local().max))
        assert manager.save(2, into)
        with manager.steady(3, into):
            # The handler saves: a single process need not wait for others.
            signal.raise_signal(signal.SIGUSR1)
            steps = manager.steps()
        return found.step, least, most, steps


def go_on_apart(out):
    rank = dist.get_rank()
    # All ranks must make all groups.
    mine = [DeviceMesh("cpu", [each]) for each in range(2)][rank]
    if rank:
        shutil.copytree(out, f"{out}-{rank}")
    dist.barrier()
    return go_on(f"{out}-{rank}" if rank else out, mine)


@pytest.mark.parametrize("rank", [0, 2])
def test_what_one_rank_cannot_load_no_rank_loads(four, tmp_path, rank):
    four.run(fill, tmp_path / "run", 1, 2)
    strike = groups.Strike(rank, points.READ, OSError(errno.EIO, "Input/output error"))
    with pytest.warns(RuntimeWarning, match="rank 0: .*step-00000002 cannot be loaded") as caught:
        found = four.run(restore, tmp_path / "run", strike=strike, timeout=2 * TIMEOUT)
    assert found == [(1, [2], 1.0)] * 4
    # Only rank 0 warns, for all ranks.
    assert len(caught) == 1


def restore_less(out):
    """Restore into a state with more tensors than an older checkpoint has."""
    into = {"a": torch.zeros(100), "b": torch.zeros(3_000_000)}
    with fastckpt.Manager(out, ranks=RANKS, read_only=True) as manager:
        found = manager.restore(into=into, strict=False)
        return found.step, float(into["a"].sum()), float(into["b"].sum())


def test_what_a_damaged_one_has_more_than_an_older_one_leaves_no_trace_on_any_rank(four, tmp_path):
    # Blocks of the other tensor are undamaged, and would be loaded before the damage is detected.
    ones, twos, many = torch.full((100,), 1.0), torch.full((100,), 2.0), torch.full((3_000_000,), 2.0)
    with fastckpt.Manager(tmp_path) as manager:
        manager.save(1, {"a": ones})
        manager.save(2, {"a": twos, "b": many})
    shard = tmp_path / "step-00000002" / "model.safetensors"
    content = bytearray(shard.read_bytes())
    content[content.index(twos.numpy().tobytes())] ^= 1
    shard.write_bytes(content)
    with pytest.warns(RuntimeWarning, match="rank 0: .*step-00000002 cannot be loaded"):
        assert four.run(restore_less, tmp_path, timeout=2 * TIMEOUT) == [(1, 100.0, 0.0)] * 4


def test_what_storage_refuses_to_one_rank_ends_the_restore_on_all(four, tmp_path):
    four.run(fill, tmp_path / "run", 1, 2)
    strike = groups.Strike(3, points.OPEN_TO_RESTORE, PermissionError(errno.EACCES, "refused"))
    four.start(restore, tmp_path / "run", strike=strike)
    for each in four.outcomes(2 * TIMEOUT):
        assert each.raised.kind == ("PermissionError" if each.rank == 3 else "RanksError")
        assert "refused" in each.raised.text


def restore_badly(out):
    with fastckpt.Manager(out, ranks=RANKS) as manager:
        manager.restore(io="bogus" if dist.get_rank() == 2 else "auto")


def test_an_option_that_is_wrong_on_one_rank_ends_the_restore_on_all(four, tmp_path):
    four.run(fill, tmp_path / "run", 1)
    four.start(restore_badly, tmp_path / "run")
    for each in four.outcomes(2 * TIMEOUT):
        assert each.raised.kind == ("ValueError" if each.rank == 2 else "RanksError")
        assert "io must be one of" in each.raised.text


def test_a_run_without_a_checkpoint_that_can_be_loaded_is_an_error_on_all_ranks(four, tmp_path):
    four.run(fill, tmp_path / "run", 1)
    (tmp_path / "run" / "step-00000001" / "model.safetensors").write_bytes(b"damaged")
    four.start(restore, tmp_path / "run")
    for each in four.outcomes(2 * TIMEOUT):
        assert each.raised.kind == "CorruptCheckpointError"
        assert "none of 1 checkpoints can be loaded" in each.raised.text


def differ(out, what):
    rank = dist.get_rank()
    options = {
        "keep": {"keep": 2 + rank // 3},
        "save_when": {"save_when": when.Every(steps=5 + rank // 3)},
        "read_only": {"read_only": rank == 3},
        "directory": {},
    }.get(what, {})
    with fastckpt.Manager(f"{out}{rank if what == 'directory' else ''}", ranks=RANKS, **options) as manager:
        manager.should_save(1 + (rank == 3))


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("keep", "keep: rank 0 has last=2, and rank 3 has last=3"),
        ("save_when", r"save_when: rank 0 has Every\(steps=5\), and rank 3 has Every\(steps=6\)"),
        ("read_only", "read_only: rank 0 has False, and rank 3 has True"),
        ("directory", "all ranks must make the same calls"),
        ("step", "ranks are at steps from 1 to 2"),
    ],
)
def test_ranks_that_differ_are_told(four, tmp_path, what, text):
    four.start(differ, tmp_path / "run", what)
    for each in four.outcomes(2 * TIMEOUT):
        assert each.kind == "raised", each
        assert re.search(text, each.raised.text)


def evaluate(out):
    """Each rank evaluates separately, so losses and durations differ."""
    rank = dist.get_rank()
    with fastckpt.Manager(out, ranks=RANKS) as manager:
        for step in (1, 2):
            metrics = {"loss": 2.0 - step + rank, "eval_runtime": 0.1 * rank}
            manager.save(step, {"w": torch.ones(10), "step": step}, metrics, metadata={"host": f"node{rank}"})
        manager.wait()


def test_metrics_and_metadata_are_those_of_the_first_rank(four, tmp_path):
    four.run(evaluate, tmp_path / "run")
    found = fastckpt.Manager(tmp_path / "run", read_only=True).restore()
    assert (found.step, found.metrics) == (2, {"loss": 0.0, "eval_runtime": 0.0})
    assert fastckpt.open(tmp_path / "run" / "step-00000002").metadata["host"] == "node0"


def hosts(out, size):
    socket.gethostname = lambda: f"node{dist.get_rank() // size}"
    return fastckpt.Manager(out, ranks=RANKS)._ranks.share


def test_one_rank_of_each_host_brings_a_share(forge, tmp_path):
    with forge.group(4) as group:
        assert group.run(hosts, tmp_path, 2) == [(0, 2), None, (1, 2), None]


def act_alone(out):
    """Save and restore on one rank alone, while the other ranks do something else."""
    with fastckpt.Manager(out, ranks="alone") as manager:
        manager.save(1, {"rank": dist.get_rank()})
        manager.wait()
        with pytest.raises(ValueError, match="per_rank"):
            manager.save(2, {}, per_rank={})
        return manager.restore().state["rank"]


def test_a_rank_may_act_alone(four, tmp_path):
    assert four.run(act_alone, tmp_path / "run", ranks=[2]) == [2]


def come_late(out):
    manager = fastckpt.Manager(out)
    dist.init_process_group("gloo", init_method="env://")
    told = []
    for call in (lambda: manager.should_save(1), lambda: manager.save(1, {}), manager.restore):
        with pytest.raises(RuntimeError, match="before the process group"):
            call()
        told.append(True)
    assert fastckpt.Manager(f"{out}-alone", ranks="alone").save(1, {})
    return len(told)


def test_a_process_group_that_comes_after_the_manager_is_told(forge, tmp_path):
    with forge.group(2, backend="") as group:
        assert group.run(come_late, tmp_path / "run", timeout=2 * TIMEOUT) == [3, 3]


def outlive(out, default):
    """Use a manager whose group was destroyed; ``default``: another default group exists by then."""
    group = None if default else dist.new_group(backend="gloo")
    with fastckpt.Manager(out, ranks=distributed.Ranks(group, timeout=TIMEOUT)) as manager:
        manager.save(1, state(1))
        manager.wait()
        dist.destroy_process_group(group)
        del group
        if default:
            store = dist.FileStore(f"{out}-store", 2)
            dist.init_process_group("gloo", store=store, rank=int(os.environ["RANK"]), world_size=2)
        for call in (lambda: manager.should_save(2), lambda: manager.save(2, {}), manager.restore):
            with pytest.raises(RuntimeError, match="process group that the manager was made for is gone"):
                call()
    return manager.steps()


@pytest.mark.parametrize("default", [True, False])
def test_a_manager_whose_process_group_is_gone_saves_nothing(forge, tmp_path, default):
    """Otherwise, each rank would save alone, all to the same path."""
    with forge.group(2) as group:
        assert group.run(outlive, tmp_path / "run", default) == [[1], [1]]


def step_on(out, raises):
    with fastckpt.Manager(out, ranks=distributed.Ranks(timeout=SHORT), save_when=when.Every(time="1h")) as manager:
        for step in range(1, 10**9):
            manager.should_save(step)
            dist.barrier()
            if step == 3:
                groups.report("ready")
                if raises and dist.get_rank() == 1:
                    raise ValueError("out of memory")
                # This removes torch's own wait for the missing rank, which is not tested here.
                dist.barrier = lambda: None


@pytest.mark.parametrize("raises", [True, False])
def test_a_rank_that_is_gone_is_missed(forge, tmp_path, raises):
    """A rank that left its ``with`` statement is reported at once; a stopped rank is named after the timeout."""
    with forge.group(3) as group:
        group.start(step_on, tmp_path / "run", raises)
        for rank in range(3):
            assert group.heard(rank) == "ready"
        if not raises:
            group.kill(1)
        for each in group.outcomes(2 * TIMEOUT, ranks=[0, 2]):
            assert each.raised.kind == "RanksError"
            why = "its `with` statement ended with ValueError: out of memory" if raises else "has not answered"
            assert f"rank 1 on {socket.gethostname()}" in each.raised.text
            assert why in each.raised.text


def fork(out):
    """Check that a child of a rank asks no rank and saves nothing."""
    with fastckpt.Manager(out, ranks=RANKS) as manager:
        child = os.fork()
        if child == 0:
            try:
                manager.should_save(1)
            except RuntimeError:
                os._exit(7)
            finally:
                os.kill(os.getpid(), signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        return os.waitstatus_to_exitcode(status), manager.save(1, state(1))


def test_a_forked_child_of_a_rank_does_nothing(four, tmp_path):
    assert four.run(fork, tmp_path / "run") == [(7, True)] * 4
