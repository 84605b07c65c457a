from run_script import answer_of

from slurmspot.checkpoint.verify import verify


def test_savers_that_die_or_race_never_leave_a_wrong_checkpoint(tmp_path):
    at_every_change, at_random, last_step, left, content = answer_of(
        "killed_saver.py", tmp_path, timeout_s=120
    )
    assert at_every_change > 20
    assert at_random == 25
    assert last_step > 3
    # The save after the last kill has cleaned up what the dead ones left.
    assert left == [f"step-{last_step:08d}", f"step-{last_step + 1:08d}"]
    assert content
    for folder in ("anywhere", "race"):
        assert all(report.intact for report in verify(tmp_path / folder))
