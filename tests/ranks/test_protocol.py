"""The protocol, case by case: each rank's outcome, its delay, and the keys that remain in the store."""

from __future__ import annotations

import pytest

from fastckpt._ranks import protocol, tree, words
from fastckpt._ranks.attention import Attention
from fastckpt._ranks.called import Called, marks_of
from fastckpt._ranks.member import Member
from fastckpt._ranks.messages import Message, join
from fastckpt.exceptions import RankFailure, RanksError
from harness.simulated import Faults, Job, World


def job(size, operations=1, *, timeout=30.0, turn=protocol.Turn, **faults):
    world = World(7)
    world.timeout = timeout
    world.faults = Faults(**faults)
    return Job(world, size, operations, turn=turn)


def run(one, until=10_000.0):
    one.start()
    one.world.run(until=until)
    one.check()
    return one


def errors(one, number=0):
    return {rank: result.error for rank, result in one.outcomes(number).items()}


def test_a_tree_has_every_rank_once():
    for size in (1, 2, 33, 34, 1057, 1058, 5000):
        reached = [rank for above in range(size) for rank in tree.below(above, size)]
        assert sorted(reached) == list(range(1, size))
        assert all(rank in tree.below(tree.above(rank), size) for rank in range(1, size))
        assert tree.count_below(0, size) == size - 1
        assert tree.count_below(1, size) == sum(1 + tree.count_below(rank, size) for rank in tree.below(1, size))


@pytest.mark.parametrize(
    "value",
    [None, True, 0, -1.5, "ü", b"", b"\0\xff", [], {}, [b"a", {"b": [b"c" * 1000, None]}, "d"], {"": {"x": b"y"}}],
    ids=repr,
)
def test_values_come_back(value):
    if value == [b"a", {"b": [b"c" * 1000, None]}, "d"]:
        assert len(words.encode(value)) < 1100
    assert words.decode(words.encode(value)) == value


@pytest.mark.parametrize("value", [{1: 2}, {"\0bytes": 1}, {1, 2}, [object()]], ids=["number", "mark", "set", "object"])
def test_values_that_would_change_are_refused(value):
    with pytest.raises(TypeError):
        words.encode(value)


def test_success_leaves_the_store_empty():
    one = run(job(40, 3))
    for number in range(3):
        one.check_success(number)
    assert one.world.store == {}


def test_between_two_operations_nothing_is_left_and_rounds_clear_up_after_each_other():
    one = job(5, 2)
    one.begins[1] = 100.0
    one.start()
    one.world.run(until=50.0, stop=True)
    assert one.world.store == {}


def test_a_short_operation_asks_little():
    """A leaf's requests: hello and welcome once; a message, a bell and a verdict in each round; one when it leaves."""
    one = run(job(10, 11))
    requests = [process.requests for process in one.processes]
    # A leaf also sleeps twice in each operation, and the last rank to leave removes the remaining keys.
    assert min(requests[1:]) == 5 + 11 * (2 + 3 * 3 + 1)
    assert max(requests[1:]) <= 5 + 11 * (2 + 3 * 3 + 1) + 11
    assert requests[0] <= 5 + 11 * (2 + 3 * 7 + 2)


def test_all_failures_are_listed_up_to_sixteen():
    raises = {(0, rank): 2 for rank in range(50, 90)}
    one = run(job(100, raises=raises))
    told = errors(one)[0]
    assert isinstance(told, RanksError)
    assert [failure.rank for failure in told.failures] == list(range(50, 66))
    assert told.failures[0] == RankFailure(50, "host-6", "failed: BoomError: rank 50 at step 2")
    assert "and 24 more" in str(told)
    assert str(told).startswith(
        "save: /checkpoint: rank 50 on host-6 failed: BoomError: rank 50 at step 2; rank 51 on host-6"
    )
    assert str(told).endswith("nothing was committed; the old checkpoint is unchanged")
    # A rank keeps its own exception, with a note about the exceptions of others.
    assert str(errors(one)[60]) == "rank 60 at step 2"
    assert str(one.results[0, 60].verdict) == str(told)


def test_those_who_work_learn_of_a_failure_soon():
    one = job(5, raises={(0, 3): 2})
    one.work = {(0, rank): 1000.0 for rank in (0, 1, 2, 4)}
    run(one)
    assert max(result.ended for result in one.outcomes(0).values()) < 10


def test_the_words_for_a_silent_rank():
    one = run(job(40, deaths={1: (12, False)}))
    for told in errors(one).values():
        assert "rank 1 on host-0 has not answered for 30.0 s (Ranks(timeout=)); 7 ranks answer through it" in str(told)


def test_a_rank_that_works_for_long_is_not_silent():
    one = job(4)
    one.work = {(0, 2): 900.0}
    run(one)
    one.check_success(0)


@pytest.mark.parametrize("silent", [0, 1, 39])
def test_a_rank_that_falls_silent_while_all_work_is_named_in_time(silent):
    """Ranks that wait for the silent rank's bytes do not reach the round in which they would miss that rank."""

    class Dying(protocol.Turn):
        def look(self):
            if self.member.rank == silent and one.world.now >= 100:
                one.processes[silent].dead = True
            yield from super().look()

    one = job(40, turn=Dying)
    one.work = {(0, rank): 1000.0 for rank in range(40)}
    run(one)
    assert [result.ended for result in one.outcomes(0).values() if not 125 < result.ended < 100 + 30 + 5] == []
    for told in errors(one).values():
        assert [failure.rank for failure in told.failures] == [silent]
        assert "has not answered for 30.0 s" in str(told)


@pytest.mark.parametrize("busy", [0, 1, 39])
def test_a_rank_that_works_longer_than_the_others_waits_for_none_of_them(busy):
    """Ranks that have sent their message send no more heartbeats, and do not count as silent."""
    one = job(40)
    one.work = {(0, busy): 900.0}
    run(one)
    one.check_success(0)
    assert max(result.ended for result in one.outcomes(0).values()) > 900


@pytest.mark.parametrize("late", [0, 1, 4])
@pytest.mark.parametrize("doing", ["meeting", "working", "waiting"])
def test_where_all_stand_still_nobody_is_accused(doing, late):
    """The machine or the store stops for many timeouts; one rank continues a little later than the others."""
    one = job(40)
    if doing == "meeting":
        one.lateness = {(0, late): 60.0 if late else 20.0}
    elif doing == "working":
        one.work = {(0, rank): 100.0 for rank in range(40)}
    else:
        one.work = {(0, late): 100.0}
    one.start()
    for at in (10.0, 700.0):
        one.world.run(until=at, stop=True)
        for process in one.processes:
            process.asleep_until = at + 500.0 + (1.0 if process.rank == late else 0.0)
    one.world.run(until=10_000.0)
    one.check()
    one.check_success(0)


def test_a_coordinator_that_dies_while_it_commits_leaves_an_unknown_outcome():
    class Dying(protocol.Turn):
        def _conclude(self, expected, verdict, number=None):
            if expected == protocol.DECIDING and self.name == "done" and self.member.rank == 0:
                one.processes[0].dead = True
            return (yield from super()._conclude(expected, verdict, number))

    one = job(5, turn=Dying)
    run(one)
    assert one.committed == [0]
    for rank in range(1, 5):
        assert "the outcome is unknown: look at the path" in str(errors(one)[rank])
        assert [failure.rank for failure in errors(one)[rank].failures] == [0]


def test_a_coordinator_that_wakes_up_late_does_not_commit():
    class Stopping(protocol.Turn):
        def _decide(self, joined, *how):
            if self.name == "done":
                one.processes[0].asleep_until = one.world.now + 100
            return (yield from super()._decide(joined, *how))

    one = job(5, turn=Stopping)
    run(one)
    assert one.committed == []
    assert {str(error) for error in errors(one).values()} == {
        (
            "save: /checkpoint: rank 0 on host-0 has not answered for 30.0 s (Ranks(timeout=)): "
            "nothing was committed; the old checkpoint is unchanged"
        )
    }


def test_a_coordinator_that_was_given_up_after_it_committed_says_so():
    def commit(number, count):
        one.processes[0].asleep_until = one.world.now + 100
        return Job.commit(one, number, count)

    one = job(5)
    one.commit = commit
    run(one)
    assert one.committed == [0]
    assert "this rank has committed it after the others had given up" in str(errors(one)[0])
    assert all("outcome is unknown" in str(errors(one)[rank]) for rank in range(1, 5))


def test_an_exception_of_the_coordinator_while_it_decides_fails_all():
    def commit(number, count):
        raise OSError(28, "No space left on device")

    one = job(4)
    one.commit = commit
    one.start()
    with pytest.raises(OSError, match="No space left"):
        one.world.run(until=100.0)
    one.processes[0].ended = True
    one.world.run(until=100.0)
    for rank in range(1, 4):
        told = one.results[0, rank].error
        assert "rank 0 on host-0 failed: OSError: [Errno 28] No space left on device: nothing was" in str(told)


def test_a_combination_that_fails_names_its_rank():
    def combine(values):
        raise ValueError("overlap")

    own = Message(Called("save", "/checkpoint", None, {}), "done", [], 0, 1, [])
    member = protocol.Member(0, 2, "host", "word")
    joined = join(member, own, {1: own}, combine)
    assert joined.failures == [RankFailure(0, "host", "failed: ValueError: overlap")]
    assert joined.value is None


def test_other_calls_are_named():
    one = job(4, 2)
    one.call_of = lambda number, rank: ("load", "/b") if (number, rank) == (0, 3) else ("save", "/a")
    run(one)
    for error in errors(one).values():
        assert "rank 3 on host-0 loads /b, rank 0 saves /a: all ranks must make the same calls in the same" in str(
            error
        )
    one.check_success(1)


def test_a_late_rank_gets_the_verdict_of_the_turn_that_was_given_up():
    one = job(5, 3)
    one.lateness = {(1, 4): 50.0}
    one.begins = {1: 100.0, 2: 300.0}
    run(one)
    one.check_success(0)
    assert all("rank 4 on host-0 has not answered for 30.0 s" in str(error) for error in errors(one, 1).values())
    assert one.results[1, 4].ended < 100 + 50 + 5
    one.check_success(2)
    assert one.world.store == {}


def test_a_rank_that_lost_the_store_tells_so_when_it_comes_again():
    """The rank gives up before the others, which get an error at once when it begins its next operation."""
    one = job(5, 3, timeout=100.0)
    one.begins = {2: 1000.0}
    one.lateness = {(0, 4): 90.0}
    one.world.faults.cuts = {3: (9, 50.0)}
    run(one)
    assert "the store" in str(errors(one)[3])
    for rank in (0, 1, 2, 4):
        assert "rank 3 on host-0 gave up: the store" in str(errors(one)[rank])
        assert one.results[0, rank].ended < 90 + 10
    one.check_success(2)


def test_an_interrupted_rank_ends_the_turn_at_once():
    one = run(job(5, 2, raises={(0, 3): 11}))
    assert "rank 3 on host-0 failed: Interrupt: rank 3 at step 1" in str(errors(one)[0])
    assert max(result.ended for result in one.outcomes(0).values()) < 8
    one.check_success(1)


def test_a_large_message_and_a_large_answer_travel_in_parts():
    class Large(Job):
        def body(self, turn, number):
            everybody = yield from turn.round("arrive", b"%d" % turn.member.rank * (protocol.VALUE + 1))
            assert [len(one) for one in everybody] == [protocol.VALUE + 1] * 3
            self.succeeded.add((number, turn.member.rank))
            yield from turn.round("done", None, None, lambda _: None, lambda _: self.commit(number, 3))
            return everybody

    world = World(1)
    one = Large(world, 3, 1)
    one.start()
    largest = []
    world.set = lambda key, value: (largest.append(len(value)), World.set(world, key, value))[1]
    world.run(until=100.0)
    assert one.results[0, 2].answer == one.results[0, 0].answer
    assert max(largest) <= protocol.VALUE
    assert world.store == {}


def test_the_error_can_be_pickled():
    import pickle

    error = RanksError("text", (RankFailure(1, "host", "failed: X"),))
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.failures) == ("text", error.failures)


def test_a_rank_is_silent_also_while_others_come_one_after_the_other():
    one = job(33, timeout=20.0, deaths={32: (1, False)})
    one.lateness = {(0, rank): 0.6 * rank for rank in range(32)}
    run(one)
    one.check_named(0, {32})
    told = max(result.ended for result in one.outcomes(0).values())
    assert told <= 20.0 + 5.0, told


@pytest.mark.parametrize("timeout", [0.5, 5.0, 20.0, 64.0, 600.0])
@pytest.mark.parametrize("size", [2, 1024, 16_384, 100_000])
def test_silence_is_heard_in_more_looks_than_it_has_to_be(size, timeout):
    """The time between two looks counts as at most a quarter of the timeout."""
    turn = protocol.Turn(Member(1, size, "here", "word"), "save", "/checkpoint", timeout)
    assert max(turn.slice, turn.long_slice, turn.work_slice) <= timeout / 20


class Hostile(dict):
    """A user's mapping, whose methods must not run."""

    def __len__(self):
        raise AssertionError

    items = __iter__ = __len__


def test_plain_values_in_nested_mappings_tell_calls_apart():
    loop = {"epoch": 3}
    loop["itself"] = loop
    state = {
        "scheduler": Hostile(count=2, base_lrs=[0.1]),
        "loop": loop,
        "step": 5,
        "table": {f"w{number}": number for number in range(65)},
        7: 8,
        "huge": 1 << 64,
        "n" * 70: 1,
        "text": "t" * 40,
    }
    assert marks_of({"step": 4}, state) == {
        "0.step": "4",
        "1.step": "5",
        "1.text": repr("t" * 32),
        "1.scheduler.count": "2",
        "1.loop.epoch": "3",
    }
    assert len(marks_of({f"{number}": number for number in range(64)})) == 16


class Operation:
    """A stand-in for an operation that counts the heartbeats of a rank."""

    def __init__(self):
        self.lived = 0

    def alive(self):
        self.lived += 1

    def check(self):
        pass


def lives(bandwidth):
    """Whether a rank sends a heartbeat although it has written nothing since the previous one."""
    operation = Operation()
    attention = Attention(operation, 10.0, bandwidth)
    attention(1 << 20, 1 << 30)
    assert operation.lived == 1
    attention(1 << 20, 1 << 30)
    return operation.lived == 2


def test_a_rank_that_holds_itself_back_is_not_silent():
    # A limited rank may be slow for an hour, but no longer; without a limit, no write should take long.
    assert lives(1e5)
    assert not lives(1e20)
    assert not lives(None)


class MuteError(Exception):
    def __str__(self):
        raise ValueError("no words")


def test_an_error_without_words_is_told_by_its_name():
    assert words.told(MuteError()) == "failed: MuteError"
    assert words.told(KeyError("a")) == "failed: KeyError: 'a'"
