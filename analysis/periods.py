# %% [markdown]
# # Two periods compared
#
# Has it become better? Attempts before and after a moment, side by side. Change `EXPORT`, `ZONE`
# and `MOMENT`: the day that a setting changed, say.

# %%
from datetime import UTC
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd

from slurmspot.timeline import frames
from slurmspot.timeline.attempts import read_timeline

EXPORT, ZONE = Path("data/sacct.txt"), UTC
MOMENT = pd.Timestamp("2026-11-29T20:02:30Z")

# %%
attempts = frames.attempts(read_timeline(EXPORT.read_bytes(), tz=ZONE).jobs)
training = attempts[~attempts["name"].str.contains("preemptor")]
period = (training["submit"] >= MOMENT).map({False: "before", True: "after"}).rename("period")


# %%
def figures(rows: pd.DataFrame) -> pd.Series:
    """What to compare: rates, medians and shares, each with its unit in its name."""
    ran_h = rows["ran"].dt.total_seconds().sum() / 3600
    taken = rows["kind"].isin(["preempted", "node_fail", "requeued"]).sum()
    waited_s = (rows["backoff"] + rows["queue"]).dt.total_seconds()
    return pd.Series(
        {
            "attempts": len(rows),
            "GPU hours": rows["gpu_hours"].sum(),
            "interruptions per 100 h": 100 * taken / ran_h if ran_h else 0.0,
            "median wait, s": waited_s.median(),
            "waited, % of wall": 100 * waited_s.sum() / (waited_s.sum() + 3600 * ran_h),
        }
    )


compared = pd.DataFrame(
    {name: figures(rows) for name, rows in training.groupby(period, sort=False)}
)
compared.round(2)

# %%
figure, axis = plt.subplots(figsize=(9, 2.4))
for name, rows in training.groupby(period, sort=False):
    seconds = rows["ran"].dt.total_seconds().sort_values()
    share = [(index + 1) / len(seconds) for index in range(len(seconds))]
    axis.step(seconds, share, where="post", label=f"{name} ({len(rows)})")
axis.set_xlabel("seconds an attempt ran")
axis.set_ylabel("share of attempts")
axis.set_title("How long attempts last")
axis.legend()
