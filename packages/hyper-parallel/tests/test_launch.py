from __future__ import annotations

import threading
import time

from hp_plan import ModelSection, ParallelPlan
from hp_platform.extend import Place
from hyper_parallel.launching.launch import Job, RankFailure
from hyper_parallel.supervision import run_end as ends
from hyper_parallel.supervision.run_end import DivergedError


def test_a_failure_that_ranks_agree_on_is_that_of_all():
    agreed = str(RankFailure(1, "reading the data failed on 1 of 2 ranks: rank 0: no such file"))
    assert agreed.startswith("all ranks have failed together. Their end:\nreading the data failed on 1 of 2 ranks: ")
    assert str(RankFailure(1, "no tokens; give files with text", alike=True)) == "no tokens; give files with text"
    assert str(RankFailure(1, "killed")) == "rank 1 failed first; all ranks are ended. Its end:\nkilled"


def test_only_what_all_ranks_raised_is_said_to_be_theirs(tmp_path, monkeypatch):
    monkeypatch.setattr(ends, "_PATIENCE", 0.0)
    job = Job(ParallelPlan(model=ModelSection(config="Qwen3Config")), flights=tmp_path)
    error = DivergedError("the loss of step 3 is nan")
    ends.tell_end(job, Place(1, 2, 1, 2), error)
    assert ends.ended_alike(tmp_path, 2) is None
    ends.tell_end(job, Place(0, 2, 0, 2), KeyError("w"))  # nothing that its user could mend
    assert ends.ended_alike(tmp_path, 2) is None
    ends.tell_end(job, Place(0, 2, 0, 2), error)
    assert ends.ended_alike(tmp_path, 2) == "the loss of step 3 is nan"
    ends.tell_end(job, Place(0, 2, 0, 2), DivergedError("the loss of step 3 is inf"))
    assert ends.ended_alike(tmp_path, 2) is None


def test_no_rank_leaves_before_all_are_past_their_last_barrier(tmp_path):
    """Else a message that one still owes the others may be lost, and they wait for ever."""
    plan = ParallelPlan(model=ModelSection(config="Qwen3Config"))
    job = Job(plan, flights=tmp_path)
    threads = [threading.Thread(target=ends.leave_together, args=(job, Place(rank, 3, rank, 3))) for rank in range(3)]
    for thread in threads[:2]:
        thread.start()
    while len(list(tmp_path.glob("*.past"))) < 2:
        time.sleep(0.01)
    assert all(thread.is_alive() for thread in threads[:2])
    threads[2].start()
    for thread in threads:
        thread.join()
    ends.leave_together(Job(plan), Place(0, 2, 0, 2))  # started by another launcher: no folder to meet in
