# %% [markdown]
# # What it cost, and what spot saved
#
# The useful work and the five terms that take from the nominal discount. Change `RUNS`, `SACCT`
# and `PRICES` (a TOML file like [prices.toml](../slurmspot/cost/prices.toml)).

# %%
from datetime import UTC
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd

from slurmspot.cost.bill import bill
from slurmspot.cost.prices import load_prices
from slurmspot.cost.usage import TERMS, usages
from slurmspot.report import history
from slurmspot.runfolder import RunFolder

RUNS, SACCT, ZONE = [Path("data/baseline"), Path("data/spot")], Path("data/sacct.txt"), UTC
PRICES = load_prices()

# %%
bills = []
for run in RUNS:
    found = history.of_run(RunFolder.open(run), sacct_file=SACCT, tz=ZONE)
    bills.append(bill(usages(found.timeline.jobs, found.events), PRICES, name=run.name))
pd.DataFrame({one.name: {**one.amounts, "total": one.total} for one in bills})

# %% [markdown]
# Amounts are whole cents and add up to the total. What they take for granted:

# %%
print("\n".join(f"- {line}" for line in bills[-1].assumptions))

# %% [markdown]
# ## Nominal and effective
#
# A run of a minute spends most of it on starting, so that spot saves nothing here; what counts is
# how the shares move as runs get longer.

# %%
pd.DataFrame(
    {one.name: {"nominal discount": one.nominal, "effective saving": one.saving} for one in bills}
).map("{:.1%}".format)

# %%
hours = pd.DataFrame({one.name: dict(one.gpu_hours) for one in bills}).loc[list(TERMS)].T
axis = hours.plot.barh(stacked=True, figsize=(9, 2.2), colormap="viridis", width=0.6)
axis.set_xlabel("GPU hours")
axis.set_title("GPU hours by term")
axis.legend(ncols=6, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.3))
plt.gcf()
