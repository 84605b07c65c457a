"""The only place that talks to Slurm."""
