"""However an epoch is cut, and cut anew, each of its samples comes once."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from gpucost.training.program.position import Cut, Position
from gpucost.training.ranks import Alone

ORDER: dict[str, Any] = {"seed": 3, "epoch": 1, "shuffle": True}
cuts = st.builds(Cut, samples=st.just(40), batch=st.integers(1, 50), accumulate=st.integers(1, 6), scaled=st.booleans())


@given(ways=st.lists(st.tuples(cuts, st.integers(0, 30)), min_size=1, max_size=4), last=cuts)
def test_no_sample_is_lost_or_comes_twice_when_the_cut_changes(ways: list[tuple[Cut, int]], last: Cut) -> None:
    position, done, part = Position(), [], []
    for cut, stop_after in (*ways, (last, 1000)):
        position = Position.of(position.saved())
        if position.recut(cut, Alone(), **ORDER, drop_last=False):
            part = []  # Of a batch that was not complete, which begins again.
        for share in cut.shares(position.begin, Alone(), **ORDER, drop_last=False)[position.given :][:stop_after]:
            position.given += 1
            part += share.indices.tolist()
            if share.last:
                done += part
                part = []
    assert sorted(done) == list(range(40))


@given(cut=cuts, given=st.integers(0, 60), drop_last=st.booleans())
def test_the_same_cut_goes_on_where_it_was(cut: Cut, given: int, drop_last: bool) -> None:
    position = Position(given=given, cut=cut)
    assert not position.recut(cut, Alone(), **ORDER, drop_last=drop_last)
    assert position == Position(given=given, cut=cut)


@given(before=cuts, after=cuts)
def test_an_epoch_that_is_done_stays_done(before: Cut, after: Cut) -> None:
    shares = before.shares(0, Alone(), **ORDER, drop_last=True)
    position = Position(given=len(shares), cut=before)
    position.recut(after, Alone(), **ORDER, drop_last=True)
    if before != after:
        assert after.shares(position.begin, Alone(), **ORDER, drop_last=True) == []
