"""The logs that processes compare: where they differ, and how small they stay."""

import pytest

from jzero.processes._call_log import FAILS, MEETS, RUNS, WAITS, CallLog, Copy, first_difference


def log_of(calls):
    log = CallLog()
    for name in calls:
        log.runs(name)
    return log


def difference(*logs, after=0):
    found = first_difference(dict(enumerate(logs)), after)
    return found and (found.call, found.groups)


def test_only_changes_are_kept():
    copy = log_of("aaabba").copy()
    assert (copy.calls, copy.entries) == (6, [[1, RUNS, "a"], [4, RUNS, "b"], [6, RUNS, "a"]])


@pytest.mark.parametrize(
    ("calls", "expected"),
    [
        (("aaa", "aaa"), None),
        (("aaa", "aab"), (3, [("a", [0]), ("b", [1])])),
        (("aaa", "a"), None),  # It is only slow.
        (("aaaa", "abbb"), (2, [("a", [0]), ("b", [1])])),
        (("aba", "aaa"), (2, [("b", [0]), ("a", [1])])),
        (("aab", "aba", "aab"), (2, [("b", [1]), ("a", [0, 2])])),
        (("abab" * 50, "abab" * 50), None),
    ],
)
def test_first_difference(calls, expected):
    assert difference(*(log_of(names).copy() for names in calls)) == expected


def ended(calls):
    log = log_of(calls)
    log.ends("end")
    return log


def waiting(calls, kind=WAITS, name="new"):
    log = log_of(calls)
    entry = log.waits("new")
    if kind != WAITS:
        log.settle(entry, kind, name)
    return log


@pytest.mark.parametrize(
    ("one", "other", "differs"),
    [
        (waiting("a"), waiting("a"), False),  # They find out by themselves.
        (waiting("a"), log_of("a"), False),
        (waiting("a"), log_of("aa"), True),  # It runs what it knows, and does not come.
        (waiting("a"), waiting("a", MEETS, "b"), False),  # It has yet to leave.
        (waiting("a", MEETS, "b"), waiting("a", MEETS, "b"), False),
        (waiting("a", MEETS, "b"), log_of("ab"), False),
        (waiting("a", MEETS, "b"), log_of("aa"), True),
        (waiting("a", FAILS, "x"), waiting("a", FAILS, "y"), False),  # All were refused.
        (waiting("a", FAILS, "x"), waiting("a"), False),
        (waiting("a", FAILS, "x"), log_of("aa"), True),
        (ended("a"), log_of("a"), False),
        (ended("a"), ended("a"), False),
        (ended("a"), log_of("aa"), True),
        (ended("a"), waiting("a"), True),
        (ended("a"), waiting("a", FAILS, "x"), False),
    ],
)
def test_calls_that_had_to_be_agreed_on(one, other, differs):
    for logs in ((one, other), (other, one)):
        found = first_difference(dict(enumerate(log.copy() for log in logs)))
        assert (found and found.call) == (2 if differs else None)


def test_what_was_alike_is_forgotten():
    slow, fast = log_of("ab" * 10), log_of("ab" * 15)
    for log in (slow, fast):
        log.forget(19)
    assert len(slow.copy().entries) == 2
    assert slow.copy().entries[0] == [19, RUNS, "a"]
    assert difference(slow.copy(), fast.copy(), after=19) is None
    slow.runs("b")
    assert difference(slow.copy(), fast.copy(), after=19) == (21, [("b", [0]), ("a", [1])])


def test_log_stays_small_though_nobody_confirms():
    copy = log_of("ab" * 10_000).copy()
    assert len(copy.entries) == 4096
    assert difference(copy, Copy(1, [[1, RUNS, "a"]])) is None


def test_history_tells_all_calls_apart():
    assert log_of("aab").history == log_of("aab").history
    assert len({log_of(calls).history for calls in ("ab", "aab", "abb", "ba")}) == 3  # ab, then b
