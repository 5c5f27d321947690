"""The way of a request, from what the kernel's scheduler says."""

from __future__ import annotations

from benchmarks.gateway.hand_offs import Schedule, Step, rows

CLIENT, GATEWAY, OTHER = 10, 20, 99
# The client asks at 1 us, the gateway begins at 6, is put aside for `OTHER` from 8 to 18, and wakes
# the client at 20, which reads its answer at 25.
LINES = """
   10    100.000001000: sched:sched_wakeup: comm=python pid=20 prio=120 target_cpu=001
   10    100.000002000: sched:sched_switch: prev_comm=python prev_pid=10 prev_prio=120 \
prev_state=S ==> next_comm=swapper/0 next_pid=0 next_prio=120
    0    100.000006000:       sched:sched_switch: prev_comm=swapper/1 prev_pid=0 prev_prio=120 \
prev_state=R ==> next_comm=a b next_pid=20 next_prio=120
   20    100.000008000: sched:sched_switch: prev_comm=a b prev_pid=20 prev_prio=120 \
prev_state=R+ ==> next_comm=other next_pid=99 next_prio=120
   99    100.000018000: sched:sched_switch: prev_comm=other prev_pid=99 prev_prio=120 \
prev_state=S ==> next_comm=a b next_pid=20 next_prio=120
   20    100.000020000: sched:sched_wakeup: comm=python pid=10 prio=120 target_cpu=000
    0    100.000023000: sched:sched_switch: prev_comm=swapper/0 prev_pid=0 prev_prio=120 \
prev_state=R ==> next_comm=python next_pid=10 next_prio=120
a line that says something else
"""
US, BEGAN = 1000, 100 * 10**9


def way(*known: int, began: int = 0) -> list[Step]:
    before = f"0 99.000000000: sched:sched_switch: prev_pid=0 prev_state=R ==> next_pid={CLIENT}\n"
    before += f"{CLIENT} 99.500000000: sched:sched_switch: prev_pid={GATEWAY} prev_state=S ==> "
    schedule = Schedule((before + "next_pid=0\n" + LINES).split("\n"))
    return schedule.way(CLIENT, BEGAN + began, BEGAN + 25 * US, known)


def test_each_hand_off_has_its_wake_up_and_what_was_computed_without_pauses() -> None:
    assert way(CLIENT, GATEWAY) == [
        Step(CLIENT, 0, US),
        Step(GATEWAY, 5 * US, 4 * US),
        Step(CLIENT, 3 * US, 2 * US),
    ]


def test_a_way_that_a_stranger_is_on_is_none() -> None:
    assert way(CLIENT) == []


def test_the_table_has_a_line_for_each_step_each_process_and_all() -> None:
    steps = [
        {"thread": "client", "wake_us": 0.0, "computed_us": 1.4},
        {"thread": "gateway thread 3", "wake_us": 5.0, "computed_us": 4.0},
        {"thread": "gateway", "wake_us": 2.0, "computed_us": 3.0},
    ]
    assert list(rows({"requests": 3, "of": 4, "steps": steps})) == [
        ("client", "0", "1"),
        ("gateway thread 3", "5", "4"),
        ("gateway", "2", "3"),
        ("client, in all", "0", "1"),
        ("gateway, in all", "7", "7"),
        ("all, 3 of 4 requests", "7", "8"),
    ]
