# %% [markdown]
# # A first look at one job
#
# What happened to a run, attempt by attempt. To look at your own, change the line that begins with
# `RUN`; without a run folder, an export of sacct alone will do (see the next notebook).

# %%
from datetime import UTC
from pathlib import Path

import matplotlib.pyplot as plt

from slurmspot.report import history
from slurmspot.report.document import GROUPS
from slurmspot.runfolder import RunFolder
from slurmspot.timeline import frames
from slurmspot.timeline.recovery import interruptions

RUN, SACCT, ZONE = Path("data/spot"), Path("data/sacct.txt"), UTC

# %%
found = history.of_run(RunFolder.open(RUN), sacct_file=SACCT, tz=ZONE)
attempts = frames.attempts(found.timeline.jobs)
attempts[["job_id", "attempt", "kind", "submit", "queue", "ran", "nodes", "gpus"]]

# %% [markdown]
# ## Where the time went
#
# Each attempt divided by what the run logged. Slurm's accounting knows whole seconds; phases inside
# an attempt come from the event log.

# %%
phases = frames.phases(found.timeline.jobs)
seconds = phases.assign(seconds=phases["length"].dt.total_seconds())
by_phase = seconds.pivot_table(
    index="attempt", columns="phase", values="seconds", aggfunc="sum", fill_value=0.0
)
order = [name for names in GROUPS.values() for name in names if name in by_phase]
by_phase = by_phase[order]
by_phase.round(1)

# %%
axis = by_phase.plot.barh(stacked=True, figsize=(9, 2.6), colormap="viridis", width=0.7)
axis.invert_yaxis()
axis.set_xlabel("seconds")
axis.set_title("Phases of each attempt")
axis.legend(ncols=4, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.25))
plt.gcf()

# %% [markdown]
# ## What each interruption cost

# %%
lost = frames.interruptions(interruptions(found.timeline.jobs, found.events))
lost[["kind", "injected", "at_step", "notice", "recovered", "steps_lost", "rpo", "rto"]]

# %% [markdown]
# ## Moment by moment
#
# Seconds since the last step before each interruption. Slurm's accounting knows whole seconds, so
# what it tells can seem to come a little early.

# %%
moments = lost.set_index("kind").filter(regex="_at$")
after = moments.sub(moments["last_step_at"], axis=0).apply(lambda times: times.dt.total_seconds())
after.rename(columns=lambda name: name.removesuffix("_at")).T.round(1)
