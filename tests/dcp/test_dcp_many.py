"""Many simulated ranks agree on a save with dcp: rank 0's work for each other rank is bounded.

The tests count bytes and calls; ``python -m bench.ranks_dcp`` measures seconds.
"""

from __future__ import annotations

from bench import ranks_dcp
from harness import limits

TENSORS = 40
#: Bytes of all values in the form in which a rank sends them.
VALUES = ranks_dcp.VALUES * len("[\"values.00\", 0, [\"[['list',2],0,'value']\", []]]")
#: Bytes that a rank sends for the stages' values with a tensor: a digest of each value, and one of its tensors.
STAGES = ranks_dcp.STAGES * (
    len('["stages.0", 0, ["[[tuple,2],0,[tensor,0]]", [["1", "float32", [2], null]], "", ""]]') + 128
)
#: Bytes around what ranks send: digests, numbers of ranks, and other things that do not grow.
SLACK = 600


def agree(*sizes, boxes=False):
    """What rank 0 and the others sent and received, for groups of these sizes."""
    return [ranks_dcp.agree(size, TENSORS, boxes=boxes) for size in sizes]


def test_the_answers_to_meshes_do_not_grow_with_ranks():
    few, many = agree(8, 64)
    assert few[0].answers.keys() == {"values", "arrive"}
    for name, size in few[0].answers.items():
        assert abs(many[0].answers[name] - size) < 24
        assert {each.answers[name] for each in many} == {many[0].answers[name]}


def test_what_comes_up_to_the_first_rank_does_not_grow_with_tensors_and_ranks():
    few, many = agree(8, 64)
    for received in (few[0].received, many[0].received):
        # Each rank that sends to this one sends each value once, and only a digest of tensors.
        assert sum(received.values()) < (limits.of("ranks below a rank") + 1) * (VALUES + STAGES + SLACK)
    assert all(
        sum(each.received.values()) < (limits.of("ranks below a rank") + 1) * (VALUES + STAGES + SLACK)
        for each in many[1:]
    )


def test_equal_cuts_of_boxes_are_one_and_signs_of_life_are_given():
    few, many = agree(8, 64, boxes=True)
    assert few[0].alive >= TENSORS
    assert many[0].alive >= TENSORS
    names = TENSORS * len('["model.layers.000000.weight",0],')
    for traffic, size in ((few[0], 8), (many[0], 64)):
        # The answer says only once, for all tensors, which rank has which box.
        assert traffic.answers["boxes"] < names + size * len("[[[100, 101], [0, 64]], [[100, 101]]],") + SLACK
        assert traffic.answers["arrive"] < SLACK
