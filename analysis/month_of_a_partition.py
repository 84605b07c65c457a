# %% [markdown]
# # A month of a partition
#
# How often attempts end before their time, how long they wait and how long they last: from an
# export of sacct alone, of any cluster, whether or not slurmspot launched anything there. Save
# yours as the line below says, and change `EXPORT`, `ZONE` and `PARTITION`.

# %%
from datetime import UTC
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd

from slurmspot.timeline import frames
from slurmspot.timeline.attempts import read_timeline
from slurmspot.timeline.records import COMMAND

EXPORT, ZONE, PARTITION = Path("data/sacct.txt"), UTC, "spot"
print(COMMAND.replace("--jobs=ID", "--allusers --starttime=now-30days"))

# %%
timeline = read_timeline(EXPORT.read_bytes(), tz=ZONE)
attempts = frames.attempts(timeline.jobs)
here = attempts[attempts["partition"] == PARTITION]
print(
    f"{len(here)} attempts of {here['job_id'].nunique()} jobs; "
    f"{len(timeline.rejected)} rows were not understood"
)

# %% [markdown]
# ## How attempts end

# %%
ends = here.groupby("kind").agg(
    attempts=("kind", "size"),
    median_ran=("ran", "median"),
    gpu_hours=("gpu_hours", "sum"),
)
ends.sort_values("attempts", ascending=False)

# %% [markdown]
# ## Mean time between interruptions
#
# Hours that attempts ran, over the number of attempts that capacity took away. It is the μ of the
# best checkpoint interval.

# %%
TAKEN = ["preempted", "node_fail", "requeued"]
hours = here["ran"].dt.total_seconds().sum() / 3600
count = here["kind"].isin(TAKEN).sum()
pd.Series({"hours run": hours, "interruptions": count, "hours between them": hours / max(count, 1)})

# %% [markdown]
# ## Waiting

# %%
waits = pd.DataFrame(
    {name: here[name].dt.total_seconds() for name in ("backoff", "queue")}
).set_index(here["submit"])
figure, axis = plt.subplots(figsize=(9, 2.4))
axis.step(waits.index, waits["backoff"], where="post", label="backoff after a requeue")
axis.step(waits.index, waits["queue"], where="post", label="queue")
axis.set_ylabel("seconds")
axis.set_title(f"Waiting for capacity in partition {PARTITION}")
axis.legend()
figure.autofmt_xdate()
